"""Account of the wall time of a run and of all its starts."""

from __future__ import annotations

import time
from pathlib import Path

from megatron.report.goodput import goodput
from megatron.report.ledger import read_ledger
from megatron.worker.beacon import EVALUATE

from ..hook import Hook, HookContext
from ..trainer import Trainer

EVERY = 300.0  # seconds between marks. After the last mark of a killed start only the launcher has an account


class GoodputHook(Hook):
    """Writes marks to the ledger from time to time and after evaluations, and logs the accounts at the end."""

    def __init__(self, parts: HookContext) -> None:
        self._ledger = Path(parts.config.run.dir) / "ledger.jsonl"
        self._marked, self._evaluated = time.monotonic(), 0.0

    def before_step(self, trainer: Trainer, step: int) -> None:
        evaluated = trainer.beacon.total(EVALUATE)
        if trainer.is_main and (evaluated > self._evaluated or time.monotonic() - self._marked >= EVERY):
            self._marked, self._evaluated = time.monotonic(), evaluated
            trainer.record("mark", step=trainer.completed, spent=trainer.spent())

    def on_end(self, trainer: Trainer) -> None:
        """After the last mark, which the ledger's own hook writes, and below the summary."""
        if not trainer.is_main or trainer.back is not None or not self._ledger.exists():
            return
        entries = read_ledger(self._ledger)
        own = goodput(entries, since=trainer.wall_time.since)
        trainer.log(f"goodput          {own.text()}")
        whole = goodput(entries)
        if whole.starts > own.starts:
            trainer.log(f"of all starts    {whole.text()}")
