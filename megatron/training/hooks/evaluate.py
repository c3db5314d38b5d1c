"""Validation losses during training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from megatron.config.stages import stage_of
from megatron.data.batch import StepBatch
from megatron.data.subsequences import cut_samples
from megatron.engine.protocol import Engine
from megatron.worker.beacon import EVALUATE

from ..breakdown import (
    Breakdown,
    ByFrequency,
    ByPosition,
    BySource,
    Grouping,
    bits_per_byte,
    bytes_of_tokens,
    token_shares,
)
from ..exchange import Exchange, StepReport
from ..hook import Hook, HookContext, ValidationSet
from ..trainer import Trainer


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def _double(number: torch.Tensor | float) -> torch.Tensor | float:
    return number.detach().double() if isinstance(number, torch.Tensor) else number


@dataclass(frozen=True)
class Measures:
    """Measures of a set in addition to its loss.

    Attributes:
        sizes: bytes of each id's text, float64 [V]. None if unknown.
        counts_bytes: whether this rank counts them: one rank of each data parallel index.
        breakdown: losses by parts.
    """

    sizes: torch.Tensor | None = None
    counts_bytes: bool = False
    breakdown: Breakdown | None = None

    def size(self, batch: StepBatch) -> float:
        """Bytes of this rank's labels, times their weights."""
        if self.sizes is None or not self.counts_bytes:
            return 0.0
        sizes = self.sizes[batch.labels]
        return float(sizes.sum() if batch.loss_mask is None else (sizes * batch.loss_mask).sum())


def evaluate(
    engine: Engine, exchange: Exchange, which: ValidationSet, measures: Measures = Measures(), length: int | None = None
) -> dict[str, Any]:
    """Loss of a set: the mean over its labels, however they fall into batches and ranks. All ranks call it.

    Args:
        length: cut the set's samples into samples of this length. None leaves them whole.

    Returns:
        loss in nats per token (nan without labels), perplexity, and the number (weight) of tokens. Bits per byte,
            where bytes are known, and the losses of the breakdown's groups.
    """
    loss_sum: torch.Tensor | float = 0.0
    tokens: torch.Tensor | float = 0.0
    size = 0.0
    breakdown = measures.breakdown
    sums = torch.zeros(2, breakdown.size, dtype=torch.float64, device=exchange.device) if breakdown else None
    for index in range(which.batches):
        batch = which.loader.step(index)
        if length is not None:
            batch = cut_samples(batch, length, which.loader.indices(index))
        if breakdown is not None and sums is not None:
            loss, count = engine.evaluate(batch, breakdown.labels(batch, sums))
        else:
            loss, count = engine.evaluate(batch)
        loss_sum, tokens = loss_sum + _double(loss), tokens + _double(count)
        size += measures.size(batch)
    extra = [] if sums is None else list(sums.flatten().unbind())
    total, count, size, *parts = exchange.sum([loss_sum, tokens, size, *extra]).tolist()
    loss = total / count if count else math.nan
    found: dict[str, Any] = {"loss": loss, "perplexity": perplexity(loss), "tokens": count}
    if measures.sizes is not None:
        found["bits_per_byte"] = bits_per_byte(total, size)
    if breakdown is not None:
        found |= breakdown.record(parts[: breakdown.size], parts[breakdown.size :])
    return found


class EvaluateHook(Hook):
    """Evaluates every set every n steps, and before the first and after the last step if asked to.

    With `training.weight_average` it evaluates the average of the weights too, as "<set> (average)".
    """

    def __init__(self, parts: HookContext) -> None:
        self._options, self._sets = parts.config.evaluation, list(parts.validation)
        self._average = parts.config.training.weight_average is not None
        self._measures: dict[str, Measures] = {}

    def on_start(self, trainer: Trainer) -> None:
        if self._options.at_start and trainer.start == 0:
            self._evaluate(trainer)

    def after_step(self, trainer: Trainer, step: int, report: StepReport) -> None:
        every = self._options.every
        due = every is not None and trainer.completed % every == 0
        if due or (self._options.at_end and trainer.completed == trainer.steps):
            self._evaluate(trainer)

    def _evaluate(self, trainer: Trainer) -> None:
        if not self._sets:
            return
        trainer.settle()
        found = self._losses(trainer, "")
        if self._average:
            with trainer.engine.averaged():
                found |= self._losses(trainer, " (average)")
        if trainer.is_main:
            trainer.sinks.write({"step": trainer.completed, "validation": found})
        for name, values in found.items():
            if not math.isfinite(values["loss"]):
                trainer.log(
                    f"the validation loss of {name} after {trainer.completed} steps is {values['loss']}: "
                    f"the set has {values['tokens']:g} labels. Check evaluation.batches and the data"
                )

    def _losses(self, trainer: Trainer, note: str) -> dict[str, dict[str, Any]]:
        """Losses of each set, named with the note. In a stage of shorter sequences the sets' samples are cut to its
        length."""
        found: dict[str, dict[str, Any]] = {}
        staged = bool(trainer.config.training.sequence_schedule)
        length = stage_of(trainer.config, trainer.completed).length if staged else None
        for each in self._sets:
            with trainer.aside(EVALUATE, each.name):
                measures = self._of(trainer, each)
                found[each.name + note] = evaluate(trainer.engine, trainer.exchange, each, measures, length)
                if staged:
                    found[each.name + note]["sequence_length"] = length
        return found

    def _of(self, trainer: Trainer, which: ValidationSet) -> Measures:
        """Measures of a set, computed once."""
        if which.name not in self._measures:
            config, at = trainer.config, trainer.mesh.at
            vocabulary = config.model.vocab_size
            groupings: dict[str, Grouping] = {}
            for name in self._options.breakdown:
                if name == "source":
                    groupings["by_source"] = BySource(which.loader.plan)
                elif name == "position":
                    groupings["by_position"] = ByPosition(config.training.sequence_length)
                else:
                    groupings["by_frequency"] = ByFrequency(token_shares(trainer.loader.plan, vocabulary))
            self._measures[which.name] = Measures(
                bytes_of_tokens(config.tokenizer, vocabulary),
                at.tensor == at.context == at.pipeline == 0,
                Breakdown(groupings) if groupings else None,
            )
        return self._measures[which.name]
