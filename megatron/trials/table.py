"""The faults of all rounds, as a table in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from megatron.config import Config
from megatron.config.problems import counted

from .chaos import Event, Round
from .faults import FAULTS

HEAD = ("fault", "times", "detected in", "recovered in", "lost steps", "status")


def where(config: Config, ranks: int, hosts: int) -> str:
    parallel, words = config.parallel, [f"ZeRO {config.zero.stage}"]
    for name in ("tensor", "pipeline", "context", "expert"):
        if (size := getattr(parallel, name)) > 1:
            words.append(f"{name} {size}")
    words.append(counted(ranks * hosts, "rank"))
    return ", ".join([*words, *([counted(hosts, "host")] if hosts > 1 else [])])


def table(rounds: Sequence[Round]) -> str:
    """A row per kind of fault (seconds: median and maximum), and a sentence about all."""
    problems = [f"run {each.number}: {problem}" for each in rounds for problem in each.problems]
    return "\n".join([*aligned([HEAD, *rows(rounds)]), "", summary(rounds), *problems])


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose first row is its head."""
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in cells]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def rows(rounds: Sequence[Round]) -> list[tuple[str, ...]]:
    events = [event for each in rounds for event in each.events]
    by_name = {fault.name: [event for event in events if event.fault == fault.name] for fault in FAULTS}
    return [_row(name, found) for name, found in by_name.items() if found]


def summary(rounds: Sequence[Round]) -> str:
    events = [event for each in rounds for event in each.events]
    good = sum(not each.problems for each in rounds)
    return (
        f"{len(events)} faults in {len(rounds)} runs, {sum(event.lost for event in events)} steps done again. "
        f"{good} of {len(rounds)} runs ended equal in every bit, with every batch read once and nothing left behind"
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
