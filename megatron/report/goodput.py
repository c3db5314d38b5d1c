"""Where the wall time of a run went, over all its starts: a sum over its ledger.

Entries with `spent` are marks. A mark has `since`, the launch of this start (seconds since the epoch), `attempt`,
`completed` updates, and the seconds of each kind, which sum to the time since `since`. `within` has the parts of
`steps`. A killed start has no last mark. The launcher's entry `restart` then has the times of its failure and its
end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

from .console import duration

KINDS = ("start", "steps", "evaluation", "save", "end")  # seconds in a mark
PARTS = {  # of the wall time, with descriptions
    "kept": "steps whose result the run still has",
    "lost": "steps that were repeated after a failure or a rollback, or were never saved",
    "start": "from the launch to the first step: processes, data, model, reading a checkpoint",
    "evaluation": "validation, benchmarks, samples",
    "save": "training stood still for a checkpoint",
    "detection": "from a failure to its end: noticed, and all ranks ended",
    "wait": "between a start that failed and the next one",
    "end": "after the last step: curves, summary",
}


@dataclass(frozen=True)
class Goodput:
    """Wall time by part, in seconds.

    Attributes:
        seconds: of each of `PARTS`.
        starts: number of launches.
        saves: checkpoints for which training stood still.
        within: of the kept steps, by phase, and in collectives ("waiting").
        again: part of `start` after a failure.
    """

    seconds: dict[str, float]
    starts: int = 0
    failures: int = 0
    saves: int = 0
    within: dict[str, float] = field(default_factory=dict)
    again: float = 0.0
    completed: int = 0

    @property
    def wall(self) -> float:
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """The share of the wall time in kept steps (effective training time ratio)."""
        return self.seconds["kept"] / self.wall if self.wall > 0 else 0.0

    def text(self) -> str:
        """One line, with the largest parts first."""
        parts = sorted(((seconds, name) for name, seconds in self.seconds.items() if name != "kept"), reverse=True)
        large = [f"{name} {seconds / self.wall:.1%}" for seconds, name in parts if seconds >= 0.0005 * self.wall > 0]
        starts = f" in {self.starts} starts" if self.starts > 1 else ""
        return f"{self.share:.1%} of {duration(self.wall)}{starts}" + (f" ({', '.join(large)})" if large else "")


@dataclass
class _Piece:
    """Steps done between two numbers of completed updates, with their time."""

    first: int
    last: int
    seconds: float
    within: dict[str, float]


@dataclass
class _Sum:
    """Adds the entries of a ledger one by one."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    pieces: list[_Piece] = field(default_factory=list)
    since: float | None = None  # of the start that the last mark or failure is of
    marked: dict[str, Any] | None = None  # the last mark of that start
    at: float = 0.0  # end of the accounted time
    starts: int = 0
    failures: int = 0
    saves: int = 0
    again: float = 0.0

    def mark(self, event: str, spent: Mapping[str, Any]) -> None:
        """A mark of a running process."""
        if spent["since"] != self.since:
            self._start(float(spent["since"]), bool(spent["attempt"]))
        before = self.marked or dict.fromkeys(KINDS, 0.0) | {"completed": spent["completed"]}
        new = {kind: max(float(spent[kind]) - float(before[kind]), 0.0) for kind in KINDS}
        for kind in KINDS:
            if kind != "steps":
                self.seconds[kind] += new[kind]
        self.again += new["start"] if spent["attempt"] else 0.0
        if event in ("start", "resume"):  # steps since the last mark are lost
            self.seconds["lost"] += new["steps"]
            self._forget(int(spent["completed"]))
        else:
            old = before.get("within", {})
            parts = {name: max(seconds - old.get(name, 0.0), 0.0) for name, seconds in spent.get("within", {}).items()}
            self.pieces.append(_Piece(int(before["completed"]), int(spent["completed"]), new["steps"], parts))
        self.saves += event == "checkpoint"
        self.marked = dict(spent)
        self.at = float(spent["since"]) + sum(float(spent[kind]) for kind in KINDS)

    def failure(self, since: float, failed: float, ended: float, attempt: int) -> None:
        """The launcher's report of a failed start. `attempt` counts earlier starts."""
        self.failures += 1
        if since != self.since:  # it failed before its first mark
            self._start(since, attempt > 0)
        tail = max(min(failed, ended) - self.at, 0.0)
        self.seconds["lost" if self.marked else "start"] += tail
        self.again += tail if attempt and not self.marked else 0.0
        self.at += tail
        self.seconds["detection"] += max(ended - self.at, 0.0)
        self.at = max(ended, self.at)

    def _start(self, since: float, again: bool) -> None:
        if again and self.since is not None:  # time before a start by a user does not count
            self.seconds["wait"] += max(since - self.at, 0.0)
        self.starts += 1
        self.since, self.marked, self.at = since, None, since

    def _forget(self, completed: int) -> None:
        """The run resumes after this number of updates. Later steps are lost."""
        kept = []
        for piece in self.pieces:
            beyond = max(piece.last - max(piece.first, completed), 0)
            share = beyond / (piece.last - piece.first) if beyond else float(piece.first > completed)
            self.seconds["lost"] += share * piece.seconds
            if share < 1.0:
                parts = {name: (1.0 - share) * seconds for name, seconds in piece.within.items()}
                kept.append(_Piece(piece.first, min(piece.last, completed), (1.0 - share) * piece.seconds, parts))
        self.pieces = kept

    def result(self) -> Goodput:
        seconds, within = {**self.seconds, "kept": sum(piece.seconds for piece in self.pieces)}, dict[str, float]()
        for piece in self.pieces:
            for name, part in piece.within.items():
                within[name] = within.get(name, 0.0) + part
        completed = sum(piece.last - piece.first for piece in self.pieces)
        return Goodput(seconds, self.starts, self.failures, self.saves, within, self.again, completed)


def goodput(entries: Iterable[Mapping[str, Any]], *, since: float | None = None) -> Goodput:
    """The account of a run's ledger, whose entries come oldest first.

    Time between two starts counts as waiting if the second is a restart, and not at all if a user started it.

    Args:
        since: only this start of the run.
    """
    total = _Sum()
    for entry in entries:
        spent = entry.get("spent")
        if entry["event"] in ("restart", "given_up") and "since" in entry and since is None:
            total.failure(entry["since"], entry["failed"], entry["ended"], entry["attempt"] - 1)
        elif spent is not None and since in (None, spent["since"]):
            total.mark(entry["event"], spent)
    return total.result()


def best_interval(save: float, between: float) -> float:
    """Seconds between two checkpoints with the least lost time (Daly 2006, equation 37, and Young 1974 for the first
    term).

    Args:
        save: seconds that a checkpoint stops the run.
        between: mean seconds between failures.
    """
    interval = sqrt(2 * save * between)
    if save < between / 2:
        interval = max(save, interval * (1 + sqrt(save / (2 * between)) / 3 + save / (18 * between)) - save)
    return interval
