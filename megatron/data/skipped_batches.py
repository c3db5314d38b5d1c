"""The batch of the plan that each step reads if some batches are skipped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron.config import Config
from megatron.config.arithmetic.batches import Batches
from megatron.config.features.feature import wanted_features


@dataclass(frozen=True)
class LeftOut:
    """Skipped batches as pairs (step, batches), in the order of the decisions.

    From that step on, each step reads the batch that is `batches` later than without the pair. Without pairs, step s
    reads batch s."""

    pairs: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, pairs: Iterable[Iterable[int]]) -> LeftOut:
        """From lists of two numbers, as in JSON."""
        return cls(tuple((int(step), int(batches)) for step, batches in pairs))

    @classmethod
    def given(cls, config: Config) -> LeftOut:
        """From `data.left_out`."""
        return cls.of((each.step, each.batches) for each in config.data.left_out)

    def __bool__(self) -> bool:
        return bool(self.pairs)

    def __add__(self, other: LeftOut) -> LeftOut:
        return LeftOut(self.pairs + other.pairs)

    def in_samples(self, batches: Batches) -> LeftOut:
        """The same pairs in samples: they are skipped from the first sample of a step on. `batch` then has the sample
        that is read in the place of another, and `step` the place of a sample."""
        before = batches.before
        return LeftOut(tuple((before(step), before(step + count) - before(step)) for step, count in self.pairs))

    @property
    def total(self) -> int:
        """Number of skipped batches."""
        return sum(batches for _, batches in self.pairs)

    def batch(self, step: int) -> int:
        """The batch of the plan that a step reads."""
        for first, batches in reversed(self.pairs):
            if step >= first:
                step += batches
        return step

    def step(self, batch: int) -> int | None:
        """The step that reads a batch. None if it is skipped."""
        for first, batches in self.pairs:
            if batch >= first + batches:
                batch -= batches
            elif batch >= first:
                return None
        return batch


def reserve(config: Config) -> int:
    """Training batches of the plan beyond `training.steps`: the largest number that can be skipped."""
    more = (feature.skipped_batches(config) for feature in wanted_features(config).values())
    return LeftOut.given(config).total + sum(more)
