"""Validation losses during training."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from megatron.engine.protocol import Engine
from megatron.worker.beacon import EVALUATE

from ..exchange import Exchange, StepReport
from ..hook import Hook, Parts, ValidationSet
from ..trainer import Trainer


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def _double(number: torch.Tensor | float) -> torch.Tensor | float:
    return number.detach().double() if isinstance(number, torch.Tensor) else number


def evaluate(engine: Engine, exchange: Exchange, which: ValidationSet) -> dict[str, float]:
    """Loss of a set: the mean over its labels, however they fall into batches and ranks. All ranks call it.

    Returns:
        loss in nats per token, perplexity, and the number (weight) of tokens; loss nan where there were no labels.
    """
    loss_sum, tokens = 0.0, 0.0
    for index in range(which.batches):
        loss, count = engine.evaluate(which.loader.step(index))
        loss_sum, tokens = loss_sum + _double(loss), tokens + _double(count)
    total, count = exchange.sum([loss_sum, tokens]).tolist()
    loss = total / count if count else math.nan
    return {"loss": loss, "perplexity": perplexity(loss), "tokens": count}


class EvaluateHook(Hook):
    """Evaluates every set every n steps, and before the first and after the last step if asked to.

    Args:
        sets: what to evaluate.
        every: n, None for never.
        average: evaluate them with the average of the weights too, as "<set> (average)".
    """

    def __init__(
        self, sets: Sequence[ValidationSet], *, every: int | None, at_start: bool, at_end: bool, average: bool = False
    ) -> None:
        self._average = average
        self._sets, self._every, self._at_start, self._at_end = list(sets), every, at_start, at_end

    @classmethod
    def of(cls, parts: Parts) -> EvaluateHook:
        options, average = parts.config.evaluation, parts.config.training.weight_average is not None
        return cls(
            parts.validation, every=options.every, at_start=options.at_start, at_end=options.at_end, average=average
        )

    def on_start(self, trainer: Trainer) -> None:
        if self._at_start and trainer.start == 0:
            self._evaluate(trainer)

    def after_step(self, trainer: Trainer, step: int, report: StepReport) -> None:
        due = self._every is not None and trainer.completed % self._every == 0
        if due or (self._at_end and trainer.completed == trainer.steps):
            self._evaluate(trainer)

    def _evaluate(self, trainer: Trainer) -> None:
        if not self._sets:
            return
        trainer.settle()
        found = {}
        for each in self._sets:
            with trainer.aside(EVALUATE, each.name):
                found[each.name] = evaluate(trainer.engine, trainer.exchange, each)
        if self._average:
            with trainer.engine.averaged():
                for each in self._sets:
                    with trainer.aside(EVALUATE, each.name):
                        found[f"{each.name} (average)"] = evaluate(trainer.engine, trainer.exchange, each)
        if trainer.is_main:
            trainer.sinks.write({"step": trainer.completed, "validation": found})
        for name, values in found.items():
            if not math.isfinite(values["loss"]):
                trainer.log(
                    f"the validation loss of {name} after {trainer.completed} steps is {values['loss']}: "
                    f"the set has {values['tokens']:g} labels; look at evaluation.batches and the data"
                )
