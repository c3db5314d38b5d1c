"""Results of a run for its user: loss.png, the curve in the terminal, a summary."""

import statistics
from pathlib import Path

from megatron.config.arithmetic.batches import Batches, batches_of
from megatron.plan.prediction import Need, Prediction, remember
from megatron.report.curve import History, save_expert_load, save_loss_curve, summary, terminal_loss_curve
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
    def of(cls, parts: HookContext) -> "PredictionHook | None":
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


class SummaryHook(Hook):
    """Draws the loss curve and prints the summary on rank 0, also of a run that ended early or in an error."""

    def __init__(self, parts: HookContext) -> None:
        self._folder, self._curve = Path(parts.config.run.dir), parts.config.logging.curve
        self._name = parts.config.run.name or self._folder.name

    def on_end(self, trainer: Trainer) -> None:
        metrics = self._folder / "metrics.jsonl"
        if not trainer.is_main or trainer.back is not None or not metrics.exists():
            return
        history = History.read(metrics)
        if self._curve and history.training:
            save_loss_curve(history, self._folder / "loss.png", self._name)
            trainer.log(terminal_loss_curve(history))
            trainer.log(f"loss curve: {self._folder / 'loss.png'}")
            if save_expert_load(metrics, self._folder / "experts.png", self._name):
                trainer.log(f"load of the experts: {self._folder / 'experts.png'}")
        trainer.log(summary(history, seconds=trainer.clock.total, reason=_reason(trainer)))


def _reason(trainer: Trainer) -> str:
    if trainer.error is not None:
        return f"failed ({type(trainer.error).__name__})"
    return "finished" if trainer.finished else f"stopped ({trainer.stop_reason or 'stop_at_step'})"
