"""Hosts against each other: products, memory, disk, and each host's network in pairs with others. Torch-free.

A host is an outlier whose rate is below that of the others, by their median, by more than a factor. Rates are the best
of a few repetitions, since whatever else a host does makes it slower, never faster.

In a pair either side may be to blame. Each host therefore meets others in up to three rounds, in which it is in one
pair at most, and counts by its best pair. A healthy host is slow only with a bad one, a bad one with all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

ROUNDS = 3


@dataclass(frozen=True)
class Measure:
    """What is compared.

    Attributes:
        name: in the table and of the key of a host's answer.
        unit: of a shown rate.
        size: of that unit.
        factor: a host is slow that has less than the others' median by this factor. Disks and networks are shared with
            other work, and vary more.
        advice: what to do about such a host.
    """

    name: str
    unit: str
    size: float
    factor: float
    advice: str


MEASURES = (
    Measure("products", "GFLOP/s", 1e9, 1.3, "other work there, heat, a power limit, or a device that fails"),
    Measure("memory rate", "GB/s", 1e9, 1.3, "other work there, or memory modules that are missing or fail"),
    Measure("disk rate", "MB/s", 1e6, 3.0, "a disk that is full, busy or failing, or a slow way to the shared one"),
)
PAIRS = Measure("pairs", "MB/s", 1e6, 2.0, "its card, cable or port: ethtool, ibstat")


def partners(rank: int, world: int) -> list[int | None]:
    """Whom a host meets in each round, None where it waits: all pairs are different ones (the circle method of
    tournaments)."""
    seats = world + world % 2
    found: list[int | None] = []
    for round_ in range(min(seats - 1, ROUNDS)):
        circle = [0, *(1 + (place + round_) % (seats - 1) for place in range(seats - 1))]
        other = circle[seats - 1 - circle.index(rank)]
        found.append(other if other < world else None)
    return found


def best_pairs(answers: Mapping[int, Mapping[int, float]]) -> dict[int, float]:
    """The rate of each host's best pair.

    Args:
        answers: of each host, the rate with each host that it met.
    """
    return {host: max(rates.values(), default=0.0) for host, rates in answers.items()}


def outliers(rates: Sequence[float], factor: float) -> list[tuple[int, float]]:
    """Hosts that are slower than the median of the others by more than a factor, and the others' median."""
    found = []
    for host, rate in enumerate(rates):
        others = [each for other, each in enumerate(rates) if other != host]
        if others and rate * factor < median(others):
            found.append((host, median(others)))
    return found
