"""The safetensors layout, written as a stream: first the header, then the values in order.

A file is an 8-byte length, a JSON header {name: {dtype, shape, data_offsets}}, and the data without gaps. Any
safetensors reader opens it. The library's own writer needs all tensors in memory at once.

Files of `torch.save` are read too. Pickles can run code, so any object in them that is no tensor is refused."""

import json
import os
import pickle
import re
from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from .durable import opened, read_fully
from .errors import CheckpointError, understanding

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER = 100_000_000  # bytes. The safetensors library has the same limit
MAX_DIMENSIONS, MAX_SIZE = 64, 2**63  # of a shape: PyTorch has no more dimensions, and no larger numbers


@dataclass(frozen=True)
class TensorEntry:
    """Type, shape and bytes [begin, end) of one tensor, counted from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def header(
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]], metadata: dict[str, str]
) -> tuple[bytes, dict[str, TensorEntry]]:
    """The header of a file that holds `tensors` in this order, and the entry of each."""
    described: dict[str, dict[str, Any]] = {"__metadata__": dict(metadata)}
    place = 0
    for name, (dtype, shape) in tensors.items():
        size = prod(shape) * dtype.itemsize
        described[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, _entries(described, 8 + len(text))


def read_header(path: Path) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Read the entries and the metadata of a file.

    Raises:
        CheckpointError: the file is truncated or not of this format.
        OSError: it cannot be read.
    """
    with opened(path) as handle:
        size = os.fstat(handle).st_size
        first = bytearray(8)
        if read_fully(handle, memoryview(first), 0) < 8:
            raise CheckpointError(path, f"truncated: {size} bytes are too few for a safetensors file")
        length = int.from_bytes(first, "little")
        if length > min(MAX_HEADER, size - 8):
            raise CheckpointError(path, f"not a whole safetensors file: a header of {length} bytes in a file of {size}")
        text = bytearray(length)
        read_fully(handle, memoryview(text), 8)
    return parse_header(path, bytes(text), size)


def parse_header(path: Path, text: bytes, size: int) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Parse a header: the entries and the metadata of a file of `size` bytes.

    Raises:
        CheckpointError: it is not of this format, or contradicts the size.
    """
    with understanding(path):
        described = json.loads(text)
        entries = _entries(described, 8 + len(text))
        metadata = dict(described.get("__metadata__", {}))
    end = max((entry.end for entry in entries.values()), default=8 + len(text))
    if end != size:
        raise CheckpointError(path, f"its header promises {end} bytes, the file has {size}")
    _refuse_gaps(path, entries, 8 + len(text))
    return entries, metadata


def metadata_of(text: bytes) -> dict[str, str]:
    """The metadata in a header's text. Entries after the metadata are not parsed: at 10,000 ranks there are a million.

    Raises:
        ValueError, LookupError: it is no header, or has no metadata.
    """
    first = b'{"__metadata__":'
    if text.startswith(first):
        found, _ = json.JSONDecoder().raw_decode(text.decode(), len(first))
        return dict(found)
    return dict(json.loads(text)["__metadata__"])


def _entries(described: dict, base: int) -> dict[str, TensorEntry]:
    return {name: _entry(name, info, base) for name, info in described.items() if name != "__metadata__"}


def _entry(name: str, info: dict, base: int) -> TensorEntry:
    kind, shape, (begin, end) = info["dtype"], info["shape"], info["data_offsets"]
    if kind not in DTYPES:
        raise ValueError(f"{name!r:.200} has the type {kind!r:.40}. It must be one of {', '.join(DTYPES)}")
    if len(shape) > MAX_DIMENSIONS or any(type(size) is not int or not 0 <= size < MAX_SIZE for size in shape):
        raise ValueError(f"{name!r:.200} has the shape {shape!r:.100}. It must be a list of sizes")
    size = prod(shape) * DTYPES[kind].itemsize
    if type(begin) is not int or type(end) is not int or begin < 0 or end - begin != size:
        place = f"{begin!r:.40} to {end!r:.40}"
        raise ValueError(f"{name!r:.200} of {kind} {shape} has the bytes {place}. It must have {size} bytes")
    return TensorEntry(DTYPES[kind], tuple(shape), base + begin, base + end)


def _refuse_gaps(path: Path, entries: dict[str, TensorEntry], place: int) -> None:
    """Refuse gaps and overlaps between tensors: readers would disagree about the data."""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != place:
            raise CheckpointError(path, f"damaged: {name!r:.200} begins at byte {entry.begin}, not {place}")
        place = entry.end


_WANTED = re.compile(r"GLOBAL ([\w.]+)|type ([\w.]+) (?:was|is) not")


class Inert:
    """Stands for an object of another program's class: its arguments and attributes, without its code."""

    arguments: tuple[Any, ...]

    def __new__(cls, *arguments: Any) -> "Inert":
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


def _member(of: Any, name: Any) -> Inert:
    """Stands for `getattr`, which Python 3.11.0 to 3.11.3 write for members of enumerations. It looks nothing up."""
    if of is not Inert:
        raise pickle.UnpicklingError("GLOBAL builtins.getattr")
    return Inert(name)


def load_tensors(path: Path, inert: Collection[str] = ()) -> Any:
    """The content of a file, memory-mapped. No code in it is run.

    Args:
        inert: modules and packages whose objects become `Inert`. They are not imported.

    Raises:
        CheckpointError: the file is damaged, or has other objects than tensors, plain values and `inert` ones.
    """
    try:
        stand_ins: list[Any] = [(Inert, name) for name in _named(path, inert)]
        with safe_globals([*stand_ins, (_member, "builtins.getattr")] if stand_ins else []):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        # torch's own text advises to load such a file with weights_only=False, which would run what is in it.
        found = _WANTED.search(str(error))
        what = f" ({found[1] or found[2]})" if found else ""
        raise CheckpointError(
            path,
            f"it was not read: it contains objects that are not tensors{what}, and reading them can run code of "
            "its author. Ask for a file with only tensors",
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        said = str(error).strip() or type(error).__name__
        raise CheckpointError(path, f"it cannot be read: {said.splitlines()[0]}") from error


def _named(path: Path, inert: Collection[str]) -> list[str]:
    wanted = get_unsafe_globals_in_checkpoint(path) if inert else []
    return [name for name in wanted if any(name.startswith(f"{each}.") for each in inert)]
