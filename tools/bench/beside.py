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
        peak: FLOP/s of plain matrix products in the same turns, if they were measured.
        share, share_theirs: of that rate which both numbers need, by the FLOPs of the models.
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
    peak: float | None = None
    share: float | None = None
    share_theirs: float | None = None


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


def add_shares(made: Sequence[dict[str, Any]], peak: float, flops: Mapping[str, float], ours: str = "ours") -> None:
    """To lines of rates: the share of the peak that each needs.

    Args:
        peak: FLOP/s.
        flops: of a unit of work, by the names of all sides.
    """
    for line in made:
        line["peak"] = peak
        line["share"] = flops[ours] * line["ours"] / peak
        line["share_theirs"] = flops[line["peer"]] * line["theirs"] / peak


def in_turns(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each way gives (its seconds), round by round, one after another in each."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(way())
    return found


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table of some lines; with a column for the peak, and shares of it in brackets, where one of them has any."""
    peaks = any(row.get("peak") for row in rows)
    heads = ["measured", "ours", "peer", "its", "times as fast (range)", "memory, ours of its"]
    heads[1:1] = ["matmul peak"] * peaks
    text = [heads, ["---"] * len(heads)]
    for row in rows:
        memory = "" if row["memory"] is None else f"{row['memory']:.2f}"
        span = f"{row['ratio']:.2f} ({row['least']:.2f} – {row['most']:.2f})"
        ours, theirs = (_number(row, *names) for names in (("ours", "share"), ("theirs", "share_theirs")))
        cells = [row["what"], ours, row["peer"], theirs, span, memory]
        if peaks:
            cells.insert(1, f"{row['peak'] / 1e9:.0f} GFLOP/s" if row.get("peak") else "")
        text.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in text)


def _number(row: Mapping[str, Any], name: str, share: str) -> str:
    value = f"{row[name]:,.0f}" if row[name] >= 100 else f"{row[name]:.3g}"
    return f"{value} {row['unit']}" + (f" ({row[share]:.0%})" if row.get(share) is not None else "")


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
