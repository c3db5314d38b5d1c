"""Numbers near a wrong one that would do: what a problem's fix proposes."""

from __future__ import annotations

import math


def uniform_counts(blocks: int, stages: int) -> list[int]:
    """As even as can be: stages in the middle have neither embedding nor head, and take what is left over first."""
    counts = [blocks // stages] * stages
    order = [*range(1, stages - 1), 0, stages - 1] if stages > 1 else [0]
    for stage in order[: blocks % stages]:
        counts[stage] += 1
    return counts


def divisors(number: int) -> list[int]:
    """All divisors, in rising order. Fast for large numbers too."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return small + [number // each for each in reversed(small) if each * each != number]


def near(number: int, choices: list[int]) -> str:
    """The choices just below and above `number`, in words."""
    sides = [
        max((each for each in choices if each < number), default=None),
        min((each for each in choices if each > number), default=None),
    ]
    return " or ".join(str(each) for each in sides if each is not None)


def multiples(number: int, unit: int) -> str:
    """The multiples of `unit` just below and above `number`, in words."""
    below = number // unit * unit
    return " or ".join(str(each) for each in (below, below + unit) if each)
