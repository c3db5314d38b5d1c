"""Finds slow ranks, from the time that each takes for its own work, without waiting for others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from megatron.worker.beacon import BACKWARD, DATA, EXCHANGE, FORWARD, OPTIMIZER, REDUCE

# Work that all ranks of a stage share, and its phases. Forward and backward are one: a rank with brief micro-batches
# reports both as forward, and near that limit ranks may differ.
PARTS = {
    "data": (DATA,),
    "forward and backward": (FORWARD, BACKWARD),
    "reduce": (REDUCE,),
    "optimizer": (OPTIMIZER,),
    "exchange": (EXCHANGE,),
}


def parts_of(seconds: Sequence[float]) -> list[float]:
    """Seconds in each of `PARTS`, from seconds by phase."""
    return [sum(seconds[phase] for phase in phases) for phases in PARTS.values()]


@dataclass
class Slow:
    """A rank that is slow, or was.

    Attributes:
        since, until: steps between which it was slow. `until` is None while it is.
        others: largest ratio to the median of the others of its pipeline stage.
        past: largest ratio to its own best.
        part: the one of `PARTS` with the largest loss.
    """

    rank: int
    since: int
    until: int | None
    others: float
    past: float
    part: str


class Comparison:
    """Compares ranks window by window.

    Args:
        stages: stage of each rank. Ranks of a stage have the same work.
        factor: a rank is slow at this ratio to the median of its stage's others, or to its own best if it has no
            others.
        windows: number of consecutive windows in which it must be.
    """

    def __init__(self, stages: Sequence[int], factor: float, windows: int) -> None:
        self._factor, self._windows = factor, windows
        self._alike = [[rank for rank, own in enumerate(stages) if own == each] for each in dict.fromkeys(stages)]
        self._row = [0] * len(stages)
        self._best = [float("inf")] * len(stages)
        self._last = -1
        self.slow: dict[int, Slow] = {}
        self.ended: list[Slow] = []
        self.slowest: tuple[int, float, float] | None = None  # rank, times the others, times its best

    def window(self, first: int, last: int, seconds: Sequence[Sequence[float]]) -> tuple[list[Slow], list[Slow]]:
        """Take in a window.

        Args:
            first, last: its steps.
            seconds: for each rank, its own seconds in each of `PARTS`.

        Returns:
            ranks that have become slow, and ranks that are no longer slow.
        """
        sums = [sum(each) for each in seconds]
        usual, begun, over, ratios = self._usual(sums), [], [], []
        for rank, own in enumerate(sums):
            against, past = own / max(usual[rank], 1e-9), own / max(self._best[rank], 1e-9)
            ratios.append((against, rank, past))
            self._best[rank] = min(self._best[rank], own)
            self._row[rank] = self._row[rank] + 1 if against > self._factor else 0
            if self._row[rank] >= self._windows:
                now = self.slow.get(rank)
                if now is None:
                    since = first - (self._windows - 1) * (last + 1 - first)
                    self.slow[rank] = now = Slow(rank, max(since, 0), None, 0.0, 0.0, self._part(rank, seconds))
                    begun.append(now)
                now.others, now.past = max(now.others, against), max(now.past, past)
            elif rank in self.slow and not self._row[rank]:
                ended = self.slow.pop(rank)
                ended.until = first
                over.append(ended)
        self.ended += over
        slowest = max((each for each in ratios if each[0] != float("inf")), default=None)
        self.slowest = None if slowest is None else (slowest[1], slowest[0], slowest[2])
        return begun, over

    def _usual(self, sums: Sequence[float]) -> list[float]:
        usual = list(self._best)
        for ranks in self._alike:
            order = sorted(ranks, key=sums.__getitem__) if len(ranks) > 1 else []
            ordered = [sums[rank] for rank in order]
            for place, rank in enumerate(order):
                usual[rank] = median_of_others(ordered, place)
        return usual

    def _part(self, rank: int, seconds: Sequence[Sequence[float]]) -> str:
        ranks = next(ranks for ranks in self._alike if rank in ranks)
        others = [seconds[each] for each in ranks if each != rank]
        lost = [own - median(each[index] for each in others) if others else own
                for index, own in enumerate(seconds[rank])]  # fmt: skip
        return tuple(PARTS)[lost.index(max(lost))]


def median_of_others(ordered: Sequence[float], place: int) -> float:
    """The median of sorted values without the one at this place. Sorting once suffices for thousands of ranks."""
    rest = len(ordered) - 1
    low, high = (rest - 1) // 2, rest // 2
    return (ordered[low + (low >= place)] + ordered[high + (high >= place)]) / 2
