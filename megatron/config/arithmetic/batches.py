"""Global batch sizes of a run (`training.batch_schedule`): the samples of a step, and those before it. No torch.

`training.global_batch_size` is the batch of the last stage. The schedule says what earlier steps have instead. All
other code asks this file for the first sample of a step: it is the sum of the batches before it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any


@dataclass(frozen=True)
class Batches:
    """Batch sizes by step.

    Attributes:
        sizes: samples of a step in each stage.
        begins: first step of each stage, from 0. The last stage has no end.
    """

    sizes: tuple[int, ...]
    begins: tuple[int, ...] = (0,)

    @cached_property
    def _firsts(self) -> list[int]:
        """Samples before each stage."""
        steps = (end - begin for begin, end in zip(self.begins, self.begins[1:]))
        return list(accumulate((size * count for size, count in zip(self.sizes, steps)), initial=0))

    def stage(self, step: int) -> int:
        """Number of the stage of update `step`, from 0."""
        return bisect_right(self.begins, step) - 1

    def size(self, step: int) -> int:
        """Samples of update `step`, from 0."""
        return self.sizes[self.stage(step)]

    def before(self, step: int) -> int:
        """Samples of all updates before `step`: the number of its first sample."""
        stage = self.stage(step)
        return self._firsts[stage] + (step - self.begins[stage]) * self.sizes[stage]

    def step(self, sample: int) -> int:
        """The update that reads a sample, and so the number of whole batches in that number of samples."""
        stage = bisect_right(self._firsts, sample) - 1
        return self.begins[stage] + (sample - self._firsts[stage]) // self.sizes[stage]

    def counts(self, steps: int) -> Iterator[tuple[int, int]]:
        """(samples of a step, number of steps) of each stage of a run of `steps`."""
        for size, begin, end in zip(self.sizes, self.begins, (*self.begins[1:], steps)):
            if begin < min(end, steps):
                yield size, min(end, steps) - begin

    def steps_of(self, tokens: float, length: int, start: int = 0) -> float:
        """Steps from update `start` on that read a number of tokens, in samples of `length`. It may be a fraction."""
        done, first = 0.0, self.stage(start)
        for size, begin, end in zip(self.sizes[first:], self.begins[first:], self.begins[first + 1 :]):
            steps = end - max(begin, start)
            if tokens <= steps * size * length:
                return done + tokens / (size * length)
            done, tokens = done + steps, tokens - steps * size * length
        return done + tokens / (self.sizes[-1] * length)

    @property
    def common(self) -> int:
        """Greatest common divisor of all sizes: what a layout divides, each of them divides."""
        return math.gcd(*self.sizes)

    def __str__(self) -> str:
        return " to ".join(f"{each:,}" for each in sorted({min(self.sizes), max(self.sizes)}))


def batches_of(config: Any) -> Batches:
    """The batch sizes of a resolved configuration."""
    training = config.training
    return batches_by(training.global_batch_size, training.batch_schedule, training.sequence_length)


def batches_by(last: int, schedule: Sequence[Any], length: int) -> Batches:
    """Batch sizes from the values of three keys, which rules need not have checked.

    Args:
        last: `training.global_batch_size`.
        schedule: sections, or their plain values.
        length: `training.sequence_length`. A stage that ends at a number of tokens ends with the batch that has them.
    """
    sizes, begins, samples = list[int](), [0], 0
    for entry in schedule:
        values = entry if isinstance(entry, dict) else entry.model_dump()
        until, size = values.get("until"), values["global_batch_size"]
        if until is None:
            missing = max((values.get("until_tokens") or 0) - samples * length, 0)
            until = begins[-1] - (-missing // (size * length))
        begins.append(max(until, begins[-1]))
        samples += (begins[-1] - begins[-2]) * size
        sizes.append(size)
    return Batches((*sizes, last), tuple(begins))
