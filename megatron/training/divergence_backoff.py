"""A run that diverges again at the same step resumes further back, and finally stops.

The newest checkpoint may be intact, but of a run that was already lost: finite weights far from their range.
Resuming from it would fail again with each restart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.report.ledger import read_ledger

from .hooks.guard import NonFinite

MOST = 3  # starts that diverge at one step. With the same data and program a fourth would too


@dataclass(frozen=True)
class Divergence:
    """The latest starts, which all diverged at one step.

    Attributes:
        starts: completed updates that each began from, the latest last.
    """

    step: int
    starts: tuple[int, ...]
    error: str


def divergence(entries: Iterable[Mapping[str, Any]], attempts: int) -> Divergence | None:
    """The common divergence of the last `attempts` starts in a ledger, if they diverged at one step."""
    ends: list[tuple[int, int, str] | None] = []
    start = None
    for entry in entries:
        if entry["event"] in ("start", "resume"):
            if start is not None:
                ends.append(None)  # killed without a word
            start = entry["step"]
        elif entry["event"] in ("error", "end", "stop") and start is not None:
            diverged = str(entry.get("error", "")).startswith(f"{NonFinite.__name__}: ")
            ends.append((start, entry.get("step") or 0, entry["error"]) if diverged else None)
            start = None
    if start is not None:
        ends.append(None)
    alike: list[tuple[int, int, str]] = []
    for end in reversed(ends[-attempts:] if attempts else []):
        if end is None or (alike and end[1] != alike[0][1]):
            break
        alike.append(end)
    if not alike:
        return None
    return Divergence(alike[0][1], tuple(begin for begin, _, _ in reversed(alike)), alike[0][2])


def of_run(folder: Path, attempts: int) -> list[Any] | None:
    """The `Divergence` of a run's ledger as JSON values, if it happened at least twice."""
    ledger = folder / "ledger.jsonl"
    found = divergence(read_ledger(ledger), attempts) if attempts > 1 and ledger.exists() else None
    return None if found is None or len(found.starts) < 2 else [found.step, list(found.starts), found.error]
