"""Where the wall time of a run has gone, over all its starts: a sum over its ledger.

Entries with `spent` are marks. A mark has `since`, when this start of the run was launched (seconds since the epoch),
`attempt`, `completed` updates, and the seconds of each kind since then, which sum to the time since `since`; `within`
has the parts of `steps`. A start that was killed leaves no last mark; the launcher's entry `restart` then says when it
failed and when it had ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

from .console import duration

KINDS = ("start", "steps", "evaluation", "save", "end")  # what a mark tells
PARTS = {  # of the wall time, with what each is
    "kept": "steps whose result the run still has",
    "lost": "steps that were done again after a failure or a rollback, or that nobody saved",
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
        starts: how often processes were started.
        failures: how often a start failed.
        saves: checkpoints for which training stood still.
        within: of the steps that were kept, by phase, and in collectives ("waiting"); ledgers of old have none.
        again: of `start`, those after a failure.
        completed: updates that were kept.
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
        """All of it."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """The part of the wall time that went into steps that were kept (effective training time ratio)."""
        return self.seconds["kept"] / self.wall if self.wall > 0 else 0.0

    def text(self) -> str:
        """One line: the largest parts first."""
        parts = sorted(((seconds, name) for name, seconds in self.seconds.items() if name != "kept"), reverse=True)
        told = [f"{name} {seconds / self.wall:.1%}" for seconds, name in parts if seconds >= 0.0005 * self.wall > 0]
        starts = f" in {self.starts} starts" if self.starts > 1 else ""
        return f"{self.share:.1%} of {duration(self.wall)}{starts}" + (f" ({', '.join(told)})" if told else "")


@dataclass
class _Piece:
    """Steps that were done, with their time: from so many completed updates to so many."""

    first: int
    last: int
    seconds: float
    within: dict[str, float]


@dataclass
class _Sum:
    """Takes in the entries of a ledger one by one."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    pieces: list[_Piece] = field(default_factory=list)
    since: float | None = None  # of the start that the last mark or failure is of
    marked: dict[str, Any] | None = None  # the last mark of that start
    at: float = 0.0  # up to where time is accounted for
    starts: int = 0
    failures: int = 0
    saves: int = 0
    again: float = 0.0

    def mark(self, event: str, spent: Mapping[str, Any]) -> None:
        """A running process tells where it is."""
        if spent["since"] != self.since:
            self._start(float(spent["since"]), bool(spent["attempt"]))
        before = self.marked or dict.fromkeys(KINDS, 0.0) | {"completed": spent["completed"]}
        new = {kind: max(float(spent[kind]) - float(before[kind]), 0.0) for kind in KINDS}
        for kind in KINDS:
            if kind != "steps":
                self.seconds[kind] += new[kind]
        self.again += new["start"] if spent["attempt"] else 0.0
        if event in ("start", "resume"):  # what was done since the last mark is not what the run goes on from
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
        """The launcher tells how a start ended: `attempt` counts those before it."""
        self.failures += 1
        if since != self.since:  # it never came to a mark
            self._start(since, attempt > 0)
        tail = max(min(failed, ended) - self.at, 0.0)
        self.seconds["lost" if self.marked else "start"] += tail
        self.again += tail if attempt and not self.marked else 0.0
        self.at += tail
        self.seconds["detection"] += max(ended - self.at, 0.0)
        self.at = max(ended, self.at)

    def _start(self, since: float, again: bool) -> None:
        if again and self.since is not None:  # time between runs that a person started is nobody's
            self.seconds["wait"] += max(since - self.at, 0.0)
        self.starts += 1
        self.since, self.marked, self.at = since, None, since

    def _forget(self, completed: int) -> None:
        """The run goes on from so many updates: what was done beyond them is lost."""
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
    """The account of a run's ledger.

    Time between two starts counts as waiting if the second is a restart, and not at all if a person started it.

    Args:
        entries: of the ledger, oldest first.
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
    """Seconds between two checkpoints that lose least time (Daly 2006, equation 37; Young 1974 for the first term).

    Args:
        save: seconds that a checkpoint stops the run.
        between: mean seconds between failures.
    """
    interval = sqrt(2 * save * between)
    if save < between / 2:
        interval = max(save, interval * (1 + sqrt(save / (2 * between)) / 3 + save / (18 * between)) - save)
    return interval
