"""Which batch each step reads where some are left out: the batches of the plan in their order, without those."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.config import Config
from megatron.config.features.feature import wanted_features


@dataclass(frozen=True)
class LeftOut:
    """Pairs (step, batches) in the order in which they were decided: from that step on, everything is read so many
    batches later than it would have been before. Without any, step s reads batch s.
    """

    pairs: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, pairs: Iterable[Iterable[int]]) -> LeftOut:
        """From lists of two numbers, as JSON has them."""
        return cls(tuple((int(step), int(batches)) for step, batches in pairs))

    @classmethod
    def given(cls, config: Config) -> LeftOut:
        """Those of `data.left_out`."""
        return cls.of((each.step, each.batches) for each in config.data.left_out)

    def __bool__(self) -> bool:
        return bool(self.pairs)

    def __add__(self, other: LeftOut) -> LeftOut:
        return LeftOut(self.pairs + other.pairs)

    @property
    def total(self) -> int:
        """Batches that are left out."""
        return sum(batches for _, batches in self.pairs)

    def batch(self, step: int) -> int:
        """The batch of the plan that a step reads."""
        for first, batches in reversed(self.pairs):
            if step >= first:
                step += batches
        return step

    def step(self, batch: int) -> int | None:
        """The step that reads a batch; None if it is left out."""
        for first, batches in self.pairs:
            if batch >= first + batches:
                batch -= batches
            elif batch >= first:
                return None
        return batch


def reserve(config: Config) -> int:
    """Batches of training data that the plan has beyond `training.steps`: as many as can be left out."""
    more = (feature.skipped_batches(config) for feature in wanted_features(config).values())
    return LeftOut.given(config).total + sum(more)
