"""How often the recurrent core of a pattern runs: drawn by the number of the step, so that every layout draws the same.

Geiping et al. 2025 (arXiv 2502.05171, section 3.3): rate ~ LogNormal(log(mean) - spread^2 / 2, spread), passes ~
Poisson(rate) + 1. The last `backward` passes get gradients."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..pattern import BlockPattern
    from ..sections.model import RecurrenceOptions

_POINTS = 512  # at which the mean over rates is taken


@dataclass(frozen=True)
class Passes:
    """Passes through the core: first those without gradients, then those with."""

    without: float
    backward: float

    @property
    def total(self) -> float:
        return self.without + self.backward


def core_of(blocks: Sequence[BlockPattern]) -> range:
    """Indices of the repeated blocks, an empty range without a recurrent group."""
    inside = [index for index, block in enumerate(blocks) if block.recurrent]
    return range(inside[0], inside[-1] + 1) if inside else range(0)


def split(total: int, options: RecurrenceOptions) -> Passes:
    """Number of passes, and of those with gradients, the last ones."""
    backward = min(total, options.backward)
    return Passes(total - backward, backward)


@lru_cache(maxsize=4096)
def passes_of_step(options: RecurrenceOptions, seed: int, step: int) -> Passes:
    """The passes of a training step, a function of its arguments only."""
    if options.sampling == "fixed":
        return split(options.mean, options)
    rate = _rate(options, _uniform(seed, step, "rate"))
    return split(_poisson(rate, _uniform(seed, step, "passes")) + 1, options)


@lru_cache(maxsize=64)
def expected_passes(options: RecurrenceOptions) -> Passes:
    """The mean over all steps."""
    if options.sampling == "fixed":
        return split(options.mean, options)
    rates = [_rate(options, (point + 0.5) / _POINTS) for point in range(_POINTS)]
    backward = sum(sum(_at_least(rate, options.backward)) for rate in rates) / _POINTS
    return Passes(options.mean + 1 - backward, backward)


def _rate(options: RecurrenceOptions, share: float) -> float:
    """The rate below which this share of all rates is."""
    normal = NormalDist().inv_cdf(share)
    return math.exp(math.log(options.mean) - options.spread**2 / 2 + options.spread * normal)


def _poisson(rate: float, share: float) -> int:
    """The smallest count whose cumulative probability reaches `share`."""
    reached, count = 0.0, 0
    while count < rate + 40 * math.sqrt(rate) + 100:
        reached += _probability(rate, count)
        if reached >= share:
            break
        count += 1
    return count


def _at_least(rate: float, passes: int) -> list[float]:
    """The probabilities that Poisson(rate) + 1 is above 0, 1, ... passes - 1."""
    found, left = [], 1.0
    for count in range(passes):
        found.append(left)
        left = max(0.0, left - _probability(rate, count))
    return found


def _probability(rate: float, count: int) -> float:
    return math.exp(count * math.log(rate) - rate - math.lgamma(count + 1))


def _uniform(seed: int, step: int, purpose: str) -> float:
    """A number between 0 and 1, exclusive."""
    words = f"{seed}/recurrence/{step}/{purpose}".encode()
    bits = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 11
    return (bits + 0.5) / 2**53
