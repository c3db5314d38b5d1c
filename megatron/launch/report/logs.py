"""The ranks' log files of a run, as one text in the order of time."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from megatron.config.file_access import open_plain
from megatron.config.source.arguments import ArgumentError

LONGEST = 1 << 20  # characters of a line
_STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ")


def merged(run: Path) -> Iterator[str]:
    """Lines of all log files of a run directory, merged by their times, each with its rank in front.

    Clocks of different hosts may differ: what is close in time on two hosts may be shown in the wrong order.

    Raises:
        ArgumentError: no log files there.
    """
    folder = run if run.name == "logs" else run / "logs"
    files = sorted(folder.glob("*_[0-9]*.log"))
    if not files:
        raise ArgumentError(f"no log files in {folder}")
    for _, _, name, line in heapq.merge(*(_stamped(path, order) for order, path in enumerate(files))):
        stamp, _, text = line.partition(" ")
        yield f"{stamp} [{name}] {text}\n"


def _stamped(path: Path, order: int) -> Iterator[tuple[str, tuple[int, int], str, str]]:
    """(time, place, name, line) of each line. A line without a time belongs to the one before it."""
    name, stamp = path.stem.replace("rank_", ""), ""
    name = name.lstrip("0") or "0"
    with open(open_plain(path), encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(iter(partial(file.readline, LONGEST), "")):
            match = _STAMP.match(line)
            stamp = match.group().strip() if match else stamp
            text = line.rstrip("\n") if match else f"{stamp} {line.rstrip()}"
            yield stamp, (order, number), name, text
