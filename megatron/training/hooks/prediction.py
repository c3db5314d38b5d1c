"""Adds predicted and measured needs of a run to the user's history."""

from __future__ import annotations

import statistics
from pathlib import Path

from megatron.config.arithmetic.batches import Batches, batches_of
from megatron.plan.prediction import Need, Prediction, remember
from megatron.report.jsonl import lines_of, sound_metrics

from ..hook import Hook, HookContext
from ..trainer import Trainer
from .log import memory_bytes

FIRST = 3  # steps that warm up or compile
LEAST = 10  # steps after them that are needed for a pace


class PredictionHook(Hook):
    """On rank 0, at the end of a start without an error that was long enough to have a pace. Only steps with the batch
    of the last stage count, which is predicted."""

    def __init__(self, folder: str | Path, prediction: Prediction, batches: Batches) -> None:
        self._metrics, self._entry, self._batches = Path(folder) / "metrics.jsonl", prediction.entry, batches
        self._begin = 0

    @classmethod
    def of(cls, parts: HookContext) -> PredictionHook | None:
        if parts.prediction is None:
            return None
        return cls(parts.config.run.dir, parts.prediction, batches_of(parts.config))

    def on_start(self, trainer: Trainer) -> None:
        self._begin = self._metrics.stat().st_size if self._metrics.exists() else 0

    def on_end(self, trainer: Trainer) -> None:
        if not trainer.is_main or trainer.error is not None or trainer.completed - trainer.start < FIRST + LEAST:
            return
        seconds = self._paces(max(trainer.start, self._batches.begins[-1]) + FIRST)
        if not seconds:
            return
        try:
            remember(self._entry, Need(statistics.median(seconds), memory_bytes(trainer.exchange.device)))
        except OSError as error:
            trainer.log(f"the history of predictions cannot be written: {error}")

    def _paces(self, first: int) -> list[float]:
        """Seconds per step in each record of this start, from a step on."""
        with self._metrics.open("rb") as file:
            file.seek(self._begin)
            records = [record for *_, record in lines_of(file.read(), sound_metrics) if record is not None]
        return [each["step_seconds"] for each in records if each["step"] >= first and each.get("step_seconds")]
