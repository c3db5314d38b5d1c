"""The run's ledger: its start, changes of the blend, the hash of every batch, its end."""

import platform
import time
from pathlib import Path

import torch

from megatron.data.hashing import hashes_of
from megatron.report.ledger import goodput, read_ledger
from megatron.worker.beacon import EVALUATE

from ..exchange import StepReport
from ..hook import Hook, HookContext
from ..trainer import Trainer
from .log import device_name


class LedgerHook(Hook):
    """Writes the ledger on rank 0."""

    def __init__(self, parts: HookContext) -> None:
        # Facts of the start: versions, layout, the resumed checkpoint, hash of the data.
        self._facts = dict(parts.facts or {})
        data = parts.config.data
        self._blends = [(phase.start, phase.sources) for phase in data.phases]
        if self._blends and self._blends[0][0] > 0:
            self._blends.insert(0, (0, data.train))
        self._blend: int | None = None  # number of the last reported one

    def on_start(self, trainer: Trainer) -> None:
        if trainer.is_main and (files := hashes_of(trainer.config.data.options)):
            self._facts["files"] = files
        layout = trainer.mesh.layout
        trainer.record(
            "resume" if trainer.start else "start",
            step=trainer.start,
            until=trainer.end,
            layout=layout.sizes,
            ranks=layout.world_size,
            device=device_name(trainer.exchange.device),
            seed=trainer.config.training.seed,
            python=platform.python_version(),
            torch=torch.__version__,
            spent=trainer.spent(),
            **self._facts,
        )

    def before_step(self, trainer: Trainer, step: int) -> None:
        if not self._blends:
            return
        batch = trainer.loader.left_out.batch(step)
        number = max(place for place, (start, _) in enumerate(self._blends) if start <= batch)
        if number != self._blend:
            self._blend = number
            weights = {str(each.name): each.weight for each in self._blends[number][1]}
            trainer.record("blend", step=step, weights=weights)

    def on_numbers(self, trainer: Trainer, report: StepReport) -> None:
        if trainer.ledger is not None:
            trainer.ledger.batch(report.step, report.batch_hash)

    def on_end(self, trainer: Trainer) -> None:
        if trainer.error is None and trainer.back is None:
            trainer.record(
                "end" if trainer.finished else "stop",
                step=trainer.completed,
                reason=trainer.stop_reason,
                spent=trainer.spent(),
            )


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
