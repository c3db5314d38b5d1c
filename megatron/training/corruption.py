"""Which ranks hold other bits than those that must hold the same."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

Piece = tuple[int, int]  # what stands for its name, and its hash


@dataclass(frozen=True)
class StateDifference:
    """A piece of the state that is not equal on all ranks that hold it.

    Attributes:
        code: what stands for its name.
        holders: ranks that have it.
        odd: those of them that differ from the majority; all, where there is none.
    """

    code: int
    holders: tuple[int, ...]
    odd: tuple[int, ...]

    @property
    def certain(self) -> bool:
        """Whether a majority tells who is wrong."""
        return len(self.odd) < len(self.holders)


def differences(ranks: Sequence[Sequence[Piece]]) -> list[StateDifference]:
    """Compare the pieces of all ranks, in rank order."""
    held: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for rank, pieces in enumerate(ranks):
        for code, value in pieces:
            held[code].append((rank, value))
    found = []
    for code, each in held.items():
        counts = Counter(value for _, value in each)
        if len(counts) < 2:
            continue
        value, most = counts.most_common(1)[0]
        holders = tuple(rank for rank, _ in each)
        certain = 2 * most > len(each)
        found.append(StateDifference(code, holders, tuple(r for r, v in each if v != value) if certain else holders))
    return found


def guilty(found: Sequence[StateDifference]) -> tuple[list[int], bool]:
    """The ranks at fault, and whether it is surely they: a majority somewhere tells more than a pair elsewhere."""
    certain = [each for each in found if each.certain]
    ranks = {rank for each in certain or found for rank in each.odd}
    return sorted(ranks), bool(certain)
