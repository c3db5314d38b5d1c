"""Results of a run for its user: loss.png, the curve in the terminal, a summary."""

from __future__ import annotations

from pathlib import Path

from megatron.report.curve import History, save_expert_load, save_loss_curve, summary, terminal_loss_curve

from ..hook import Hook, HookContext
from ..trainer import Trainer


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
    return "finished" if trainer.completed >= trainer.steps else f"stopped ({trainer.stop_reason or 'stop_at_step'})"
