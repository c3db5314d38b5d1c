"""What happened in all rounds, as a table of text that is also Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from .chaos import Event, Round
from .faults import FAULTS

HEAD = ("fault", "times", "detected in", "recovered in", "lost steps", "status")


def table(rounds: Sequence[Round]) -> str:
    """A row per kind of fault (seconds: median, and the greatest), and a sentence about all."""
    events = [event for each in rounds for event in each.events]
    rows: list[tuple[str, ...]] = [HEAD]
    for fault in FAULTS:
        found = [event for event in events if event.fault == fault.name]
        if found:
            rows.append(_row(fault.name, found))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    good = sum(not each.problems for each in rounds)
    lost = sum(event.lost for event in events)
    said = f"{len(events)} faults in {len(rounds)} runs, {lost} steps done again; "
    said += f"{good} of {len(rounds)} runs ended equal in every bit, with every batch read once and nothing left behind"
    problems = [f"run {each.number}: {problem}" for each in rounds for problem in each.problems]
    return "\n".join([*lines, "", said, *problems])


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
