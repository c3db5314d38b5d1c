"""The run's ledger: its start, the hash of every batch, its end."""

from __future__ import annotations

import platform

import torch

from ..exchange import StepReport
from ..hook import Hook, HookContext
from ..trainer import Trainer
from .log import device_name


class LedgerHook(Hook):
    """Writes the ledger on rank 0."""

    def __init__(self, parts: HookContext) -> None:
        # Facts of the start: versions, layout, the resumed checkpoint, hash of the data.
        self._facts = dict(parts.facts or {})

    def on_start(self, trainer: Trainer) -> None:
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

    def on_numbers(self, trainer: Trainer, report: StepReport) -> None:
        if trainer.ledger is not None:
            trainer.ledger.batch(report.step, report.batch_hash)

    def on_end(self, trainer: Trainer) -> None:
        if trainer.error is None and trainer.back is None:
            finished = trainer.completed >= trainer.steps
            trainer.record(
                "end" if finished else "stop", step=trainer.completed, reason=trainer.stop_reason, spent=trainer.spent()
            )
