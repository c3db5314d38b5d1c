"""metrics.jsonl: one JSON document per line, with all digits of every number, and a checksum (`crc`).

Readers skip a damaged line with a message, and a run that starts puts it aside. A line with `loss` is a training
line: `step` is the number of updates before it, and the loss is that of the weights after `step` updates on batch
`step`. Any other line (a validation line) is about the weights after `step` updates.
"""

import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.config.file_access import open_plain, read_plain, replacing

from .append import AppendFile, warn
from .sink import SinkParts

NUMBERS = (  # metrics that readers use by name
    "loss", "lr", "grad_norm", "tokens", "tokens_per_second", "tflops", "mfu", "peak_tflops", "step_seconds",
    "data_seconds", "memory_bytes", "eta_seconds",
)  # fmt: skip
_AT_END = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
SHOWN = 5  # most line numbers in a message
_SIGNED = re.compile(rb', "crc": "([0-9a-f]{8})"\}\s*$')


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: infinities and nans become null."""
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
    """The sink that writes metrics.jsonl line by line, so that nothing is lost with the process."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = AppendFile(self.path)

    @classmethod
    def of(cls, parts: SinkParts) -> "MetricsFile":
        return cls(parts.folder / "metrics.jsonl")

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(sign(encode(record)))

    def close(self) -> None:
        self._file.close()


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a finite number that a float holds. A flag is none."""
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 2**1023
    return isinstance(value, float) and math.isfinite(value)


def is_step(value: Any) -> bool:
    """Whether a value of JSON is a number of updates."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def sound_metrics(record: Mapping[str, Any]) -> bool:
    """Whether a line of metrics.jsonl has the form that its readers rely on."""
    named = [record.get(kind, {}) for kind in ("validation", "tasks", "moe")]
    return (
        is_step(record.get("step"))
        and all(record.get(name) is None or is_number(record[name]) for name in NUMBERS)
        and all(isinstance(each, dict) and all(isinstance(of, dict) for of in each.values()) for each in named)
        and all("loss" in each and (each["loss"] is None or is_number(each["loss"])) for each in named[0].values())
        and all(value is None or is_number(value) for each in named[1].values() for value in each.values())
        and all(_sound_load(each) for each in named[2].values())
    )


def _sound_load(layer: Mapping[str, Any]) -> bool:
    load, over = layer.get("load"), layer.get("max_over_mean")
    return (over is None or is_number(over)) and isinstance(load, list) and load != [] and all(map(is_number, load))


def sound_sample(record: Mapping[str, Any]) -> bool:
    """Whether a line of samples.jsonl has its step."""
    return is_step(record.get("step", 0))


def parse(line: bytes) -> dict[str, Any] | None:
    """The record of a line. None if it is damaged: no JSON object, or another checksum."""
    signed = _SIGNED.search(line)
    if signed and zlib.crc32(line[: signed.start()] + b"}") != int(signed[1], 16):
        return None
    try:
        record = json.loads(line.decode("utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    return record if (record.pop("crc", None) is not None) == (signed is not None) else None


def sign(line: str) -> bytes:
    """A line of JSON with the CRC-32 of its bytes as its last entry, and a line break."""
    return f'{line[:-1]}, "crc": "{zlib.crc32(line.encode()):08x}"}}\n'.encode()


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


Sound = Callable[[Mapping[str, Any]], bool]
Line = tuple[int, int, int, dict[str, Any] | None]  # number from 1, its bytes' begin and end in the file, its record


def lines_of(content: bytes, sound: Sound = lambda _: True) -> Iterator[Line]:
    """The non-blank lines of a JSON lines file. The record of a damaged one is None.

    A last line without a line break was cut off while it was written. It only comes if it is whole.

    Args:
        sound: whether a record has the form that its readers rely on.
    """
    begin = 0
    for number, line in enumerate(content.split(b"\n"), start=1):
        end = begin + len(line) + 1
        if line.strip():
            record = parse(line)
            record = record if record is not None and sound(record) else None
            if record is not None or end <= len(content):
                yield number, begin, end, record
        begin = end


def read_lines(path: str | Path, sound: Sound = lambda _: True, *, since: int = 0) -> Iterator[dict[str, Any]]:
    """The whole records of a JSON lines file. Damaged lines are skipped, with a warning on standard error.

    Args:
        sound: as in `lines_of`.
        since: only lines that begin after this number of bytes.
    """
    damaged = []
    for number, begin, _, record in lines_of(read_plain(path), sound):
        if begin < since:
            continue
        if record is not None:
            yield record
        else:
            damaged.append(number)
    if damaged:
        warn(f"{path}: {numbered(damaged)} damaged and skipped")


def numbered(lines: list[int]) -> str:
    more = f" and {len(lines) - SHOWN} more lines" if len(lines) > SHOWN else ""
    are = "lines" if len(lines) > 1 else "line"
    return f"{are} {', '.join(map(str, lines[:SHOWN]))}{more} {'are' if len(lines) > 1 else 'is'}"


def put_aside(path: str | Path, sound: Sound) -> list[int]:
    """Move damaged lines to `<name>.damaged.jsonl`. Blanks take their place: positions in the file stay the same.

    A last line that was cut off while it was written is removed. If the disk refuses, the file stays unchanged.

    Returns:
        The numbers of the damaged lines.
    """
    path = Path(path)
    try:
        content = read_plain(path)
        damaged = [(begin, end, number) for number, begin, end, record in lines_of(content, sound) if record is None]
        if content and not content.endswith(b"\n"):
            os.truncate(path, content.rfind(b"\n") + 1)
        if not damaged:
            return []
        with open(open_plain(path.with_suffix(".damaged.jsonl"), _AT_END), "ab") as file:
            for begin, end, _ in damaged:
                file.write(content[begin:end])
            file.flush()
            os.fsync(file.fileno())
        with open(path, "rb+") as file:  # in place: another process may be appending to it
            for begin, end, _ in damaged:
                file.seek(begin)
                file.write(b" " * (end - 1 - begin))
            file.flush()
            os.fsync(file.fileno())
    except FileNotFoundError:
        return []
    except OSError as error:
        warn(f"{path}: its damaged lines cannot be put aside: {error.strerror}")
        return []
    numbers = [number for _, _, number in damaged]
    warn(f"{path}: {numbered(numbers)} damaged and moved to {path.with_suffix('.damaged.jsonl').name}")
    return numbers


def evaluations_at(parts: SinkParts) -> list[dict[str, Any]]:
    """The evaluations of the weights that a resumed run starts from. It does not repeat them."""
    path = parts.folder / "metrics.jsonl"
    if not parts.start or not path.exists():
        return []
    return [each for each in read_lines(path) if each.get("step") == parts.start and "loss" not in each]


def supersede(path: str | Path, start: int) -> int:
    """Remove the lines that a run from `start` completed updates will write again.

    A new run removes all. They are moved to `<name>.superseded.jsonl` next to the file. The file is replaced in one
    move, so a kill leaves the old or the new one.

    Returns:
        The number of removed lines.
    """
    path = Path(path)
    if not path.exists():
        return 0
    kept: list[bytes] = []
    removed: list[bytes] = []
    for record in read_lines(path, sound_metrics):
        step = record.get("step", -1)
        again = step >= start if "loss" in record or start == 0 else step > start
        (removed if again else kept).append(sign(encode(record)))
    if removed:
        with open(open_plain(path.with_suffix(".superseded.jsonl"), _AT_END), "ab") as file:
            file.writelines(removed)
    with replacing(path, durable=True) as file:
        file.writelines(kept)
    return len(removed)
