"""Validation losses during training, and by parts: by source, by position of a token, by frequency of a token.

The group of a label is a function of the batch, so groups are the same on every layout. The engine adds up each
label's loss in its groups."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron.config.sections.data import TokenizerSection
from megatron.config.sequences import stage_of
from megatron.data.batch import StepBatch
from megatron.data.loader import cut_samples
from megatron.data.plan import SamplePlan, SampleSet
from megatron.data.plan_builder import is_local
from megatron.data.tokenizer import build_tokenizer
from megatron.engine.protocol import Engine, LabelGroups
from megatron.worker.beacon import EVALUATE

from ..exchange import Exchange, StepReport
from ..hook import Hook, HookContext, ValidationSet
from ..trainer import Trainer

DECADES = ("1e-2", "1e-3", "1e-4", "1e-5", "1e-6", "0")  # the least share of tokens of each group by frequency
PIECES, PIECE = 64, 1 << 18  # number and tokens of the pieces of a source that frequencies are counted in
DRAWN = 256  # the same in samples, where a run makes its data


class BySource:
    """Groups of labels by the source of the sample. `of` has the group of each label, int64 [A, M, S]."""

    def __init__(self, plan: SampleSet) -> None:
        self.plan = plan
        self.names = [each.name for each in plan.sources] if isinstance(plan, SamplePlan) else ["synthetic"]

    def of(self, batch: StepBatch) -> torch.Tensor:
        if not isinstance(self.plan, SamplePlan):
            return torch.zeros_like(batch.labels)
        pieces = self.plan.options.sequence_length // batch.labels.shape[-1]  # of a sample of the plan: `pieces.cut`
        places = [self.plan.place(number // pieces) for number in batch.sample_ids.flatten().tolist()]
        sources = [phase.members[member] for phase, member, _ in places]
        return torch.tensor(sources).view(*batch.sample_ids.shape, 1).expand(batch.labels.shape)


class ByPosition:
    """By the number of tokens that the model has read: 1, 2 to 3, 4 to 7, ... of the sample, or of the document
    where documents are separate."""

    def __init__(self, sequence_length: int) -> None:
        powers = range(1, sequence_length.bit_length())
        self.names = ["1", *(f"{2**power}-{2 ** (power + 1) - 1}" for power in powers)]

    def of(self, batch: StepBatch) -> torch.Tensor:
        if batch.positions is not None:
            read = batch.positions.long() + 1
        else:
            read = torch.arange(1, batch.labels.shape[-1] + 1).expand(batch.labels.shape)
        return torch.frexp(read.double()).exponent.long() - 1  # exact: the power of two below


class ByFrequency:
    """By the label's share of the training tokens: at least 1 %, 0.1 %, ..."""

    names = DECADES

    def __init__(self, shares: np.ndarray) -> None:
        """`shares` [V], in any unit that adds up to all tokens."""
        least = np.array([float(each) for each in DECADES])
        self.groups = torch.from_numpy((shares[:, None] < least * shares.sum()).sum(1))

    def of(self, batch: StepBatch) -> torch.Tensor:
        return self.groups[batch.labels]


Grouping = BySource | ByPosition | ByFrequency


def token_shares(plan: SampleSet, vocabulary: int) -> np.ndarray:
    """How often each id is read, float64 [vocabulary]. It is counted in evenly spaced pieces of each source (the
    whole source if small), times the tokens that the run reads of the source."""
    total = np.zeros(vocabulary)
    if not isinstance(plan, SamplePlan):
        for number in range(DRAWN):
            total += np.bincount(plan.sample(number).tokens, minlength=vocabulary)
        return total
    for source, use in zip(plan.sources, plan.uses(), strict=True):
        size, counts = source.file.tokens, np.zeros(vocabulary)
        starts = range(0, size, PIECE) if size <= PIECES * PIECE else [size * each // PIECES for each in range(PIECES)]
        for start in starts:
            counts += np.bincount(source.file.flat(start, min(PIECE, size - start)), minlength=vocabulary)[:vocabulary]
        total += counts / counts.sum() * use.tokens
    return total


def bytes_of_tokens(section: TokenizerSection, vocabulary: int) -> torch.Tensor | None:
    """UTF-8 bytes of each id's text, float64 [vocabulary]. The end of a document has none. None if unknown: the
    tokenizer is not on this machine, or its ids are no bytes."""
    if not is_local(section):
        return None
    tokenizer = build_tokenizer(section)
    table = tokenizer.bytes_of_ids()
    if table is None:
        return None
    sizes = torch.zeros(vocabulary, dtype=torch.float64)
    known = [len(each) for each in table[:vocabulary]]
    sizes[: len(known)] = torch.tensor(known, dtype=torch.float64)
    if tokenizer.eod_id is not None and tokenizer.eod_id < vocabulary:
        sizes[tokenizer.eod_id] = 0.0
    return sizes


class Breakdown:
    """The breakdown of one validation set.

    Args:
        groupings: by their names in the record, such as `by_source`.
    """

    def __init__(self, groupings: Mapping[str, Grouping]) -> None:
        self.groupings = groupings
        self.size = sum(len(each.names) for each in groupings.values())

    def labels(self, batch: StepBatch, sums: torch.Tensor) -> LabelGroups:
        """The groups of a batch's labels, with the sums that their losses are added to, float64 [2, size]."""
        first, found = 0, []
        for each in self.groupings.values():
            found.append(each.of(batch) + first)
            first += len(each.names)
        return LabelGroups(torch.stack(found, -1), sums)

    def record(self, sums: Sequence[float], weights: Sequence[float]) -> dict[str, Any]:
        """Loss and number of tokens of each group that has any."""
        found: dict[str, Any] = {}
        numbers = zip(sums, weights, strict=True)
        for name, grouping in self.groupings.items():
            own = [(group, *next(numbers)) for group in grouping.names]
            found[name] = {group: {"loss": total / count, "tokens": count} for group, total, count in own if count}
        return found


def bits_per_byte(loss_sum: float, size: float) -> float:
    """Bits that a text costs per byte of it, from the sum of its tokens' losses in nats."""
    return loss_sum / math.log(2) / size if size else math.nan


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def _double(number: torch.Tensor | float) -> torch.Tensor | float:
    return number.detach().double() if isinstance(number, torch.Tensor) else number


@dataclass(frozen=True)
class Measures:
    """Measures of a set in addition to its loss."""

    sizes: torch.Tensor | None = None  # bytes of each id's text, float64 [V]. None if unknown.
    counts_bytes: bool = False  # whether this rank counts them: one rank of each data parallel index
    breakdown: Breakdown | None = None  # losses by parts

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

    With `training.weight_average` it evaluates the average of the weights too, as "<set> (average)"."""

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
