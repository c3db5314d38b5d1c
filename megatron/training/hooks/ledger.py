"""The run's ledger: its start, changes of the blend, the hash of every batch, its end."""

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
        data = parts.config.data
        self._blends = [(phase.start, phase.sources) for phase in data.phases]
        if self._blends and self._blends[0][0] > 0:
            self._blends.insert(0, (0, data.train))
        self._blend: int | None = None  # number of the last reported one

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
            finished = trainer.completed >= trainer.steps
            trainer.record(
                "end" if finished else "stop", step=trainer.completed, reason=trainer.stop_reason, spent=trainer.spent()
            )
