"""The file of the index: its rows, and the records of the ranks' files, of which every reader looks at a few.

Its header (the vocabulary) and the groups are the model's and read whole. All that follows the header is the content of
a hash tree, whose levels are the last entry: the file is mapped, and what a reader comes to is compared with its
checksums then. So what it reads and holds does not grow with the ranks that wrote the checkpoint.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, overload

import numpy as np
import torch

from .container import TensorEntry, header, parse_header
from .durable import read_fully
from .errors import CheckpointError, reading, understanding
from .hash_tree import Growth, HashTree, spans
from .index import GROUP, Index, Trust, checksum, refuse_strange
from .rankfile import FileRecord
from .table import ROW, Vocabulary

# One row per file of a rank: 64 bytes.
FILE = np.dtype([
    ("rank", "<i8"),
    ("size", "<i8"),
    ("begin", "<i8"),
    ("end", "<i8"),
    ("header", "u1", (16,)),  # xxh3_128, as `table`
    ("table", "u1", (16,)),
])


@dataclass(frozen=True)
class IndexSeal:
    """All that must be known of an index to trust it.

    Attributes:
        size: bytes of the file.
        header: checksum of its header.
        begin, end: the content of the hash tree, up to whose root the levels follow.
        root: of the hash tree.
    """

    size: int
    header: str
    begin: int
    end: int
    root: str

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> IndexSeal:
        """A seal that was read from a file.

        Raises:
            ValueError, TypeError: it is not one.
        """
        seal = cls(**values)
        places = (0, seal.begin, seal.end, seal.size)
        if any(type(place) is not int for place in places) or sorted(places) != list(places):
            raise ValueError(f"the index's parts do not follow each other: {places}")
        if seal.begin + spans(seal.end - seal.begin)[-1][1] != seal.size:
            raise ValueError(f"an index of {seal.size} bytes does not have its checksums from byte {seal.end} on")
        if any(len(bytes.fromhex(digits)) != 16 for digits in (seal.header, seal.root)):
            raise ValueError("the index's checksums must be 32 hexadecimal digits")
        return seal


class Rows(Protocol):
    """What is known of the rows of an index before they are written.

    Attributes:
        vocabulary: what tensors and states the rows refer to.
        groups: array of `GROUP`, sorted.
    """

    vocabulary: Vocabulary
    groups: np.ndarray

    def __len__(self) -> int:
        """How many there are."""


def write_index(
    write: Callable[[bytes | memoryview], object],
    index: Rows,
    parts: Iterable[np.ndarray],
    records: Sequence[FileRecord],
) -> IndexSeal:
    """Write an index from its beginning to its end; returns how it is known again.

    Args:
        write: takes the bytes that follow.
        parts: of the rows, one behind the other.
        records: in the order of the numbers that the rows have for files.
    """
    heads = {"groups": index.groups.tobytes(), "files": _rows_of(records).tobytes()}
    sizes = {**{name: len(part) for name, part in heads.items()}, "rows": len(index) * ROW.itemsize}
    content = spans(sum(sizes.values()))
    sizes["tree"] = content[-1][1] - content[0][1]
    start, _ = header(
        {name: (torch.uint8, (size,)) for name, size in sizes.items()}, {"vocabulary": index.vocabulary.to_json()}
    )
    write(start)
    growth = Growth()

    def go_on(part: bytes | memoryview) -> None:
        growth.add(part)
        write(part)

    for part in heads.values():
        go_on(part)
    for rows in parts:
        go_on(rows.view(np.uint8).data)
    levels, root = growth.finish()
    write(levels)
    begin = len(start)
    return IndexSeal(begin + content[-1][1], checksum(start), begin, begin + content[0][1], root)


def read_index(
    path: Path, seal: IndexSeal, share: tuple[int, int] | None = (0, 1)
) -> tuple[Index, Sequence[FileRecord]]:
    """Map a written index: its fragments, and the records of its files.

    Args:
        share: which part of it (number, count) is read now and compared with its checksums; None is only what the
            caller comes to. The header and the groups always are.

    Raises:
        CheckpointError: it is lost or damaged; later, what is looked at may be.
    """
    with reading(path), understanding(path):
        file = _MappedFile(path)
        if len(file.data) != seal.size:
            raise CheckpointError(path, f"it has {len(file.data)} bytes instead of {seal.size}")
        start = file.fetch(0, seal.begin)
        if checksum(start) != seal.header:
            raise CheckpointError(path, "it does not have the checksum it was written with")
        entries, metadata = parse_header(path, start[8:], seal.size)
        tree = HashTree(path, partial(file.fetch, base=seal.begin), seal.end - seal.begin, seal.root)
        if share is not None:
            tree.check_share(share)
        tables = {name: _Table(file.data, entries[name], dtype, seal, tree) for name, dtype in _TABLES.items()}
        vocabulary, groups, rows = Vocabulary.from_json(metadata["vocabulary"]), tables["groups"], tables["rows"]
        groups.trust(0, len(groups.rows))
        refuse_strange(groups.rows, vocabulary, len(rows.rows))
        index = Index(vocabulary, rows.rows, groups.rows, rows.trust)
        return index, StoredRecords(path, tables["files"].rows, tables["files"].trust)


class _MappedFile:
    """A file whose tables are mapped, but read before they are touched: whoever touches a mapped page that the disk
    does not give, or that is gone, is killed."""

    def __init__(self, path: Path) -> None:
        handle = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, handle)
        self._handle = handle
        self.data = memoryview(mmap.mmap(handle, 0, access=mmap.ACCESS_READ) if os.fstat(handle).st_size else b"")

    def fetch(self, begin: int, end: int, base: int = 0) -> bytes:
        """Bytes `begin` to `end`, counted from `base`; fewer where the file has become shorter."""
        found = bytearray(end - begin)
        count = read_fully(self._handle, memoryview(found), base + begin)
        return bytes(found[:count])


_TABLES = {"groups": GROUP, "files": FILE, "rows": ROW}


class _Table:
    """An entry of the file as an array, and what its rows are trusted by."""

    def __init__(self, data: memoryview, entry: TensorEntry, dtype: np.dtype, seal: IndexSeal, tree: HashTree) -> None:
        if not seal.begin <= entry.begin <= entry.end <= seal.end:
            raise ValueError("a table of the index does not lie in what its checksums are of")
        self.rows = np.frombuffer(data[entry.begin : entry.end], dtype)
        self._place, self._tree = entry.begin - seal.begin, tree

    @property
    def trust(self) -> Trust:
        size, place, tree = self.rows.itemsize, self._place, self._tree
        return lambda begin, end: tree.check(place + begin * size, place + end * size)


class StoredRecords(Sequence[FileRecord]):
    """The records in an index; each is read, and compared with its checksum, when it is asked for."""

    def __init__(self, path: Path, rows: np.ndarray, trust: Trust) -> None:
        self._path, self._rows, self._trust = path, rows, trust

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, number: int) -> FileRecord: ...
    @overload
    def __getitem__(self, number: slice) -> list[FileRecord]: ...
    def __getitem__(self, number: int | slice) -> FileRecord | list[FileRecord]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        if not 0 <= number < len(self):
            raise IndexError(number)
        self._trust(number, number + 1)
        row = self._rows[number]
        values = {name: int(row[name]) for name in ("rank", "size", "begin", "end")}
        sums = {name: row[name].tobytes().hex() for name in ("header", "table")}
        with understanding(self._path):
            return FileRecord.from_dict({**values, **sums})

    def __iter__(self) -> Iterator[FileRecord]:
        return (self[number] for number in range(len(self)))


def _rows_of(records: Sequence[FileRecord]) -> np.ndarray:
    rows = np.zeros(len(records), FILE)
    for row, record in zip(rows, records, strict=True):
        for name in ("rank", "size", "begin", "end"):
            row[name] = getattr(record, name)
        for name in ("header", "table"):
            row[name] = np.frombuffer(bytes.fromhex(getattr(record, name)), np.uint8)
    return rows
