"""What the measurements of docs/performance.md have in common: one number of ours, the same of a peer, their ratio."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Beside:
    """One line of a table.

    Attributes:
        what: was measured, with its size.
        unit: of both numbers.
        peer: whose number stands beside ours.
        ratio: how many times as fast we are (of the median of neighbouring rounds): above 1 is better.
        least, most: of the rounds' ratios.
        memory: our peak memory as a share of the peer's, if it was measured.
    """

    what: str
    unit: str
    peer: str
    ours: float
    theirs: float
    ratio: float
    least: float
    most: float
    memory: float | None = None


def lines(
    what: str, unit: str, seconds: Mapping[str, Sequence[float]], work: float | None = None, ours: str = "ours"
) -> list[dict[str, Any]]:
    """Ours beside each of the others, from seconds of rounds in which they took turns.

    Args:
        work: done in those seconds (tokens, bytes): numbers are then rates, in `unit`; None gives the seconds.
    """

    def number(name: str) -> float:
        middle = statistics.median(seconds[name])
        return middle if work is None else work / middle

    made = []
    for name, theirs in seconds.items():
        if name != ours:
            ratios = [each / own for each, own in zip(theirs, seconds[ours], strict=True)]
            middle = statistics.median(ratios)
            made.append(Beside(what, unit, name, number(ours), number(name), middle, min(ratios), max(ratios)))
    return [asdict(each) for each in made]


def in_turns(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each way gives (its seconds), round by round, one after another in each."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(way())
    return found


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table of some lines."""
    text = [
        "| measured | ours | peer | its | times as fast (range) | memory, ours of its |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        memory = "" if row["memory"] is None else f"{row['memory']:.2f}"
        span = f"{row['ratio']:.2f} ({row['least']:.2f} – {row['most']:.2f})"
        both = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in (row["ours"], row["theirs"])]
        text.append(
            f"| {row['what']} | {both[0]} {row['unit']} | {row['peer']} | {both[1]} {row['unit']} | {span} | {memory} |"
        )
    return "\n".join(text)


def finish(measure: Callable[[Path], Sequence[dict[str, Any]]], as_json: bool) -> int:
    """Print the lines that a tool measures with a folder of its own; returns its exit status.

    Args:
        measure: raises RuntimeError where it cannot, which is said.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            made = measure(Path(folder))
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    print(json.dumps(made) if as_json else markdown(made))
    return 0
