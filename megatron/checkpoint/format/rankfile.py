"""What one rank writes: its fragments one after the other, and a table of them at the end of the same file."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import xxhash

from ...config.paths import UnsafeName, check_name, path_inside
from .container import DTYPE_NAMES, TensorEntry, header, metadata_of
from .durable import CHUNK, name_errors, read_fully, write_fully
from .errors import CheckpointError, understanding
from .fragment import FragmentSpec
from .index import checksum
from .table import DTYPE_ORDER, ROW, Vocabulary

TABLE_NAME = "__table__"
READERS = 32  # threads that read the tables of the ranks' files: thousands of small reads, mostly waiting
AHEAD = 2 * READERS  # tables in memory
FILES_PER_FOLDER = 256  # no folder grows with the number of ranks beyond what a file system lists with ease
_NAME = re.compile(r"data/\d{4,}/rank_(\d{5,})\.safetensors", re.ASCII)


def file_name(rank: int) -> str:
    """Path of a rank's file inside the checkpoint."""
    return f"data/{rank // FILES_PER_FOLDER:04d}/rank_{rank:05d}.safetensors"


def rank_of(name: object) -> int:
    """The rank whose file has this path.

    Raises:
        ValueError: it is no rank's.
    """
    digits = _NAME.fullmatch(check_name(name))
    if digits is None or file_name(int(digits[1])) != name:
        raise ValueError(f"{name!r} is not the name of a rank's file")
    return int(digits[1])


@dataclass(frozen=True)
class FileRecord:
    """A written file: all that must be known to trust it.

    Attributes:
        rank: who wrote it.
        size: bytes.
        header: checksum of the bytes before the first fragment.
        table: checksum of the table, which has the checksums of the fragments in turn: every byte is covered.
        begin, end: where the fragments are.
    """

    rank: int
    size: int
    header: str
    table: str
    begin: int
    end: int

    @property
    def path(self) -> str:
        """Inside the checkpoint."""
        return file_name(self.rank)

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> FileRecord:
        """A record that was read from a file.

        Raises:
            ValueError, TypeError: it is not one.
        """
        record = cls(**values)
        if type(record.rank) is not int or record.rank < 0:
            raise ValueError(f"{record.rank!r} is not a rank")
        places = (0, record.begin, record.end, record.size)
        if any(type(place) is not int for place in places) or sorted(places) != list(places):
            raise ValueError(f"{record.path}: its parts do not follow each other: {places}")
        return record

    def under(self, root: Path) -> Path:
        """Where the file is.

        Raises:
            CheckpointError: a link leads out of the checkpoint.
        """
        try:
            return path_inside(root, self.path)
        except UnsafeName as error:
            raise CheckpointError(root, str(error)) from error


def write_rank_file(
    root: Path,
    rank: int,
    items: Iterable[tuple[FragmentSpec, torch.dtype]],
    values: Callable[[int], Iterable[torch.Tensor]],
    *,
    wait: bool = True,
) -> FileRecord | None:
    """Write the file of `rank` under `root` and, unless told otherwise, wait until the disk has it.

    Args:
        items: what is written, with its types.
        values: gives the elements of the item with that number, as consecutive 1-D host tensors. Called once per
            item, when its turn has come, so that a caller that reads or computes them never holds more than one.

    Returns:
        The record, None if the rank has nothing to write.

    Raises:
        OSError: the disk is full, the folder is gone, ...
        ValueError: one name stands for two tensors, or the values are not what was announced.
    """
    # Wide types first, so that every fragment starts at a multiple of its element size.
    numbered = [(number, _canonical(spec), dtype) for number, (spec, dtype) in enumerate(items) if spec.length]
    numbered.sort(key=lambda item: -item[2].itemsize)
    if not numbered:
        return None
    vocabulary, rows = Vocabulary(), np.zeros(len(numbered), ROW)
    start, entries = _layout(rank, [(spec, dtype) for _, spec, dtype in numbered], vocabulary, rows)
    path = root / file_name(rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        with name_errors(path):
            write_fully(handle, memoryview(start))
            for row, (number, spec, dtype) in zip(rows, numbered, strict=True):
                row["checksum"] = _write_values(handle, spec, dtype, values(number))
            table = rows.tobytes()
            write_fully(handle, memoryview(table))
            if wait:
                os.fsync(handle)
    finally:
        os.close(handle)
    place = entries[TABLE_NAME]
    return FileRecord(rank, place.end, checksum(start), checksum(table), len(start), place.begin)


def _layout(
    rank: int, items: list[tuple[FragmentSpec, torch.dtype]], vocabulary: Vocabulary, rows: np.ndarray
) -> tuple[bytes, dict[str, TensorEntry]]:
    """The header of a file and where everything goes; fills the vocabulary and the rows, all but their checksums."""
    names = {_entry_name(spec): (dtype, (spec.length,)) for spec, dtype in items}
    if len(names) < len(items):
        raise ValueError(f"rank {rank} gave the same fragment twice: {_twice(spec for spec, _ in items)}")
    for row, (spec, dtype) in zip(rows, items, strict=True):
        row["tensor"], row["state"] = vocabulary.tensor(spec.tensor), vocabulary.state(spec.state)
        row["dtype"] = DTYPE_ORDER.index(DTYPE_NAMES[dtype])
        row["tensor_rank"], row["tensor_ranks"] = spec.tensor_rank, spec.tensor_ranks
        row["start"], row["length"] = spec.start, spec.length
    start, entries = header(
        {**names, TABLE_NAME: (torch.uint8, (rows.nbytes,))},
        {"format": "megatron.fragments", "vocabulary": vocabulary.to_json()},
    )
    for row, (spec, _) in zip(rows, items, strict=True):
        row["offset"] = entries[_entry_name(spec)].begin
    return start, entries


def read_table(root: Path, record: FileRecord) -> tuple[str, np.ndarray]:
    """The vocabulary (as JSON) and the rows of a written file, checked against its record.

    Raises:
        CheckpointError: the file does not have the recorded content.
        OSError: it cannot be read.
    """
    path = record.under(root)
    handle = os.open(path, os.O_RDONLY)
    try:
        start, table = bytearray(record.begin), bytearray(record.size - record.end)
        with name_errors(path):
            read_fully(handle, memoryview(start), 0)
            read_fully(handle, memoryview(table), record.end)
    finally:
        os.close(handle)
    for part, found, written in (("header", start, record.header), ("table", table, record.table)):
        if checksum(bytes(found)) != written:
            raise CheckpointError(path, f"its {part} does not have the checksum it was written with")
    with understanding(path):
        rows = np.frombuffer(bytes(table), ROW)
        places = [record.begin, *rows["offset"].tolist(), record.end]
        if sorted(places) != places:
            raise ValueError("its fragments do not follow each other")
        return metadata_of(bytes(start[8:]))["vocabulary"], rows


def tables_of(root: Path, records: Sequence[FileRecord]) -> Iterator[tuple[str, np.ndarray]]:
    """`read_table` of each, some ahead of what is taken."""
    with ThreadPoolExecutor(READERS) as pool:
        for begin in range(0, len(records), AHEAD):
            yield from pool.map(partial(read_table, root), records[begin : begin + AHEAD])


def host_chunks(data: torch.Tensor) -> Iterator[torch.Tensor]:
    """A 1-D tensor in pieces of at most `CHUNK` bytes on the host, so that a device needs no copy of it all."""
    step = max(1, CHUNK // data.element_size())
    for start in range(0, data.numel(), step):
        yield data[start : start + step].detach().cpu()


def _write_values(handle: int, spec: FragmentSpec, dtype: torch.dtype, parts: Iterable[torch.Tensor]) -> int:
    """Write one fragment; returns the checksum of its bytes."""
    digest, count = xxhash.xxh3_64(), 0
    for part in parts:
        if part.dtype != dtype:
            raise ValueError(f"{spec.label}: announced as {dtype}, but given as {part.dtype}")
        count += part.numel()
        if count > spec.length:
            break
        content = part.contiguous().view(torch.uint8).numpy().data
        digest.update(content)
        write_fully(handle, content)
    if count != spec.length:
        raise ValueError(f"{spec.label}: {spec.length} values were announced, not {count}")
    return digest.intdigest()


def _canonical(spec: FragmentSpec) -> FragmentSpec:
    """A tensor that is not cut is the same on all tensor parallel ranks: its fragments are those of one."""
    if spec.tensor.shard is not None or spec.tensor_ranks == 1:
        return spec
    return FragmentSpec(spec.tensor, spec.state, 0, 1, spec.start, spec.length)


def _entry_name(spec: FragmentSpec) -> str:
    return f"{spec.state}:{spec.tensor.name}:{spec.tensor_rank}/{spec.tensor_ranks}@{spec.start}"


def _twice(specs: Iterable[FragmentSpec]) -> str:
    counts = Counter(map(_entry_name, specs))
    return next(name for name, count in counts.items() if count > 1)
