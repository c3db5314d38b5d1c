"""What happened in all rounds, as a table of text that is also Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from megatron.config import Config
from megatron.config.words import counted

from .chaos import Event, Round
from .faults import FAULTS

HEAD = ("fault", "times", "detected in", "recovered in", "lost steps", "status")
WHERE = "where (seeds)"


@dataclass(frozen=True)
class Played:
    """Rounds of one call of the tool: the layout or hosts, the seed, and what happened."""

    where: str
    seed: int
    rounds: Sequence[Round]

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Played:
        """From what `--json` prints."""
        rounds = [
            Round(each["number"], [Event(**event) for event in each["events"]], each["problems"])
            for each in document["rounds"]
        ]
        return cls(document["where"], document["seed"], rounds)


def where(config: Config, ranks: int, hosts: int) -> str:
    """The layout in a few words."""
    parallel, words = config.parallel, [f"ZeRO {config.zero.stage}"]
    for name in ("tensor", "pipeline", "context", "expert"):
        if (size := getattr(parallel, name)) > 1:
            words.append(f"{name} {size}")
    words.append(counted(ranks * hosts, "rank"))
    return ", ".join([*words, *([counted(hosts, "host")] if hosts > 1 else [])])


def published(calls: Sequence[Played]) -> str:
    """A row per layout and kind of fault, of several calls of the tool."""
    rows: list[tuple[str, ...]] = [(HEAD[0], WHERE, *HEAD[1:])]
    told = []
    for place in dict.fromkeys(each.where for each in calls):
        here = [each for each in calls if each.where == place]
        seeds = ", ".join(map(str, sorted({each.seed for each in here})))
        rounds = [each for call in here for each in call.rounds]
        rows += [(row[0], f"{place} ({seeds})", *row[1:]) for row in _rows(rounds)]
        told.append(f"{place}: {_summary(rounds)}")
    return "\n".join([*aligned(rows), "", *told])


def table(rounds: Sequence[Round]) -> str:
    """A row per kind of fault (seconds: median, and the greatest), and a sentence about all."""
    problems = [f"run {each.number}: {problem}" for each in rounds for problem in each.problems]
    return "\n".join([*aligned([HEAD, *_rows(rounds)]), "", _summary(rounds), *problems])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table whose first row is its head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in rows]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def _rows(rounds: Sequence[Round]) -> list[tuple[str, ...]]:
    events = [event for each in rounds for event in each.events]
    by_name = {fault.name: [event for event in events if event.fault == fault.name] for fault in FAULTS}
    return [_row(name, found) for name, found in by_name.items() if found]


def _summary(rounds: Sequence[Round]) -> str:
    events = [event for each in rounds for event in each.events]
    good = sum(not each.problems for each in rounds)
    lost = sum(event.lost for event in events)
    said = f"{len(events)} faults in {len(rounds)} runs, {lost} steps done again; "
    return (
        said
        + f"{good} of {len(rounds)} runs ended equal in every bit, with every batch read once and nothing left behind"
    )


def _row(name: str, events: Sequence[Event]) -> tuple[str, ...]:
    lost = [event.lost for event in events]
    status = sorted({str(event.status) for event in events if event.status is not None})
    detected = _seconds([event.detected for event in events])
    recovered = _seconds([event.recovered for event in events])
    steps = str(lost[0]) if len(set(lost)) == 1 else f"{min(lost)}-{max(lost)}"
    return name, str(len(events)), detected, recovered, steps, ", ".join(status)


def _seconds(values: Sequence[float | None]) -> str:
    there = [value for value in values if value is not None]
    if not there:
        return ""
    return f"{there[0]:.1f}" if len(there) == 1 else f"{median(there):.1f} ({max(there):.1f})"
