"""An exponential moving average of the weights, over steps."""

from ..exchange import StepReport
from ..hook import Hook, HookContext
from ..trainer import Trainer


class AverageHook(Hook):
    """After each update: average = c average + (1 - c) weights, in fp32. c is `training.weight_average`.

    It begins with the initial weights. Checkpoints have it as the state "average" of each parameter."""

    def __init__(self, parts: HookContext) -> None:
        self._coefficient = parts.config.training.weight_average

    def on_start(self, trainer: Trainer) -> None:
        if self._coefficient is not None and trainer.start == 0:
            trainer.engine.begin_average()

    def after_step(self, trainer: Trainer, step: int, report: StepReport) -> None:
        if self._coefficient is not None and report.result.updated:
            trainer.engine.advance_average(self._coefficient)
