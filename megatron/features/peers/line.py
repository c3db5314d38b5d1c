"""A line of the ledger of rounds, and a round that has none yet."""

import time
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

JUMPS = 1000  # most jumps in a contribution: they are in a line, whose size is limited


@dataclass
class Line:
    """A line of the ledger.

    Attributes:
        members: peer, hash of its contribution, and its jumps since its last one, in the order of the sum. With
            decoupled peers also its completed steps, and those since it has received the fragment.
        absent: reason of each other peer that was expected.
        strikes: refused contributions so far, by peer.
    """

    round: int
    members: list[dict[str, Any]]
    absent: dict[str, str]
    strikes: dict[str, int]
    base: str
    peer: str

    @property
    def names(self) -> list[str]:
        return [each["peer"] for each in self.members]

    def has(self, name: str) -> bool:
        return name in self.names


@dataclass
class Waiting:
    """A round that is not applied: the contributions that were read so far, in any order.

    Attributes:
        tensors: of good contributions, so that no byte of them is read again to apply the line.
    """

    since: float = field(default_factory=time.monotonic)
    good: dict[str, dict[str, Any]] = field(default_factory=dict)
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    bad: dict[str, str] = field(default_factory=dict)
    scored: dict[tuple[str, ...], dict[str, str]] = field(default_factory=dict)
    announced: dict[str, dict[str, Any]] = field(default_factory=dict)


def jumps_can_be(jumps: Any) -> bool:
    """Whether a value has the form of `Line.members`' jumps."""
    if not isinstance(jumps, list) or len(jumps) > JUMPS or not all(isinstance(each, list) for each in jumps):
        return False
    return all(len(each) == 2 and all(type(n) is int and 0 <= n < 1 << 53 for n in each) for each in jumps)
