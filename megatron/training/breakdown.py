"""Validation losses by parts: by source, by position of a token, by frequency of a token.

The group of a label is a function of the batch, so groups are the same on every layout. The engine adds up each
label's loss in its groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from megatron.config.sections.data import TokenizerSection
from megatron.data.agreement import is_local
from megatron.data.batch import StepBatch
from megatron.data.plan import SamplePlan, SampleSet
from megatron.data.tokenizer import build_tokenizer
from megatron.engine.protocol import LabelGroups

DECADES = ("1e-2", "1e-3", "1e-4", "1e-5", "1e-6", "0")  # the least share of tokens of each group by frequency
PIECES, PIECE = 64, 1 << 18  # number and tokens of the pieces of a source that frequencies are counted in
DRAWN = 256  # the same in samples, where a run makes its data


class Grouping(Protocol):
    """Groups of labels, by name."""

    names: Sequence[str]

    def of(self, batch: StepBatch) -> torch.Tensor:
        """The group of each label, int64 [A, M, S]."""


class BySource:
    """By the source of the sample."""

    def __init__(self, plan: SampleSet) -> None:
        self.plan = plan
        self.names: Sequence[str] = (
            [each.name for each in plan.sources] if isinstance(plan, SamplePlan) else ["synthetic"]
        )

    def of(self, batch: StepBatch) -> torch.Tensor:
        if not isinstance(self.plan, SamplePlan):
            return torch.zeros_like(batch.labels)
        pieces = self.plan.options.sequence_length // batch.labels.shape[-1]  # of a sample of the plan: `pieces.cut`
        sources = [self._source(self.plan, number // pieces) for number in batch.sample_ids.flatten().tolist()]
        return torch.tensor(sources).view(*batch.sample_ids.shape, 1).expand(batch.labels.shape)

    @staticmethod
    def _source(plan: SamplePlan, number: int) -> int:
        phase, member, _ = plan.place(number)
        return phase.members[member]


class ByPosition:
    """By the number of tokens that the model has read: 1, 2 to 3, 4 to 7, ... of the sample, or of the document
    where documents are separate."""

    def __init__(self, sequence_length: int) -> None:
        self.names: Sequence[str] = [
            f"{2**power}-{2 ** (power + 1) - 1}" if power else "1" for power in range(sequence_length.bit_length())
        ]

    def of(self, batch: StepBatch) -> torch.Tensor:
        if batch.positions is not None:
            read = batch.positions.long() + 1
        else:
            read = torch.arange(1, batch.labels.shape[-1] + 1).expand(batch.labels.shape)
        return torch.frexp(read.double()).exponent.long() - 1  # exact: the power of two below


class ByFrequency:
    """By the label's share of the training tokens: at least 1 %, 0.1 %, ..."""

    def __init__(self, shares: np.ndarray) -> None:
        """`shares` [V], in any unit that adds up to all tokens."""
        self.names: Sequence[str] = DECADES
        total = shares.sum()
        least = np.array([float(each) for each in DECADES])
        self.groups = torch.from_numpy((shares[:, None] < least * total).sum(1))

    def of(self, batch: StepBatch) -> torch.Tensor:
        return self.groups[batch.labels]


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
