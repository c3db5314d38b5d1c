"""metrics.jsonl: one JSON document per line, every number with all the digits it has.

A line with `loss` is a training line: `step` is the number of updates before it, the loss is that of the weights
after `step` updates on batch `step`. Any other line (a validation line) tells of the weights after `step` updates.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .append import AppendFile
from .sink import SinkParts


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: infinities and nans, which JSON has no words for, become null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def encode(record: Mapping[str, Any]) -> str:
    return json.dumps(plain(record), allow_nan=False, ensure_ascii=False)


def flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a record by path, such as `validation/pile/loss`."""
    flat: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}/"))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            flat[f"{prefix}{key}"] = value
    return flat


class MetricsFile:
    """The sink that writes metrics.jsonl, a line at a time, so that nothing is lost with the process."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = AppendFile(self.path)

    @classmethod
    def of(cls, parts: SinkParts) -> MetricsFile:
        return cls(parts.folder / "metrics.jsonl")

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write((encode(record) + "\n").encode())

    def close(self) -> None:
        self._file.close()


def read_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """The records of a JSON lines file; a last line that was cut off while it was written is left out.

    Raises:
        ValueError: a line before the last is no JSON object; the message has the file and the line number.
    """
    with open(path, encoding="utf-8") as file:
        lines = file.read().split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):  # no line break after it
                return
            raise ValueError(f"{path}:{number}: not a JSON line: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}:{number}: not a JSON object")
        yield record


def supersede(path: str | Path, start: int) -> int:
    """Make room for a run that goes on from `start` completed updates: take away the lines it will write again.

    A run that starts anew takes all of them away. They are moved to `<name>.superseded.jsonl` beside the file, so
    nothing is forgotten; the file is replaced in one move, so a kill leaves it old or new.

    Returns:
        The number of lines taken away.
    """
    path = Path(path)
    if not path.exists():
        return 0
    kept: list[str] = []
    removed: list[str] = []
    for record in read_lines(path):
        step = record.get("step", -1)
        again = step >= start if "loss" in record or start == 0 else step > start
        (removed if again else kept).append(encode(record) + "\n")
    if removed:
        with open(path.with_suffix(".superseded.jsonl"), "a", encoding="utf-8") as file:
            file.writelines(removed)
    beside = path.with_suffix(".new")
    with open(beside, "w", encoding="utf-8") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    return len(removed)
