"""The file of the index: its rows and the records of the ranks' files.

Its header (the vocabulary) and the groups depend on the model only, and are read whole. All that follows the header is
the content of a hash tree, whose levels are the last entry. The file is mapped, and each range is verified on first
use. A reader's cost therefore does not grow with the number of ranks that wrote the checkpoint.

In a hash tree, each block of the content has a checksum. Each block of these checksums has one in turn, up to one
block, whose checksum is the root. To verify a range, its blocks and one block of each level above are read: three
levels for a gigabyte. The levels follow the content, the lowest first."""

import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import overload

import numpy as np
import torch
import xxhash

from .container import TensorEntry, header, parse_header
from .durable import read_fully
from .errors import reading, refuse_checksum, refuse_size, understanding
from .index import GROUP, Index, Merged, Trust, checksum, refuse_strange
from .rankfile import FileRecord
from .table import ROW, Vocabulary

BLOCK = 4096  # bytes: 256 checksums
DIGEST = 16  # bytes, of xxh3_128
AT_ONCE = 256  # blocks read at once: one block of checksums


class HashTreeBuilder:
    """The tree over a content that arrives in parts. No part is kept."""

    def __init__(self) -> None:
        self._lowest, self._rest = bytearray(), bytearray()

    def add(self, part: bytes | memoryview) -> None:
        """Append bytes to the content."""
        self._rest += part
        whole = max(0, len(self._rest) - 1) // BLOCK * BLOCK  # the last block may be the only one
        with memoryview(self._rest) as blocks:
            self._lowest += _digests(blocks[:whole])
        del self._rest[:whole]

    def finish(self) -> tuple[bytes, str]:
        """The levels above the content, and the root in hexadecimal digits."""
        below = bytes(self._rest)
        if self._lowest:
            below = bytes(self._lowest) + _digests(below)
        levels = [below] if self._lowest else []
        while len(below) > BLOCK:
            below = _digests(below)
            levels.append(below)
        return b"".join(levels), xxhash.xxh3_128_hexdigest(below)


def _digests(content: bytes | memoryview) -> bytes:
    return b"".join(xxhash.xxh3_128_digest(content[place : place + BLOCK]) for place in range(0, len(content), BLOCK))


def spans(size: int) -> list[tuple[int, int]]:
    """(begin, end) of a content of `size` bytes, and of each level above it."""
    found = [(0, size)]
    while (blocks := _blocks(*found[-1])) > 1:
        found.append((found[-1][1], found[-1][1] + blocks * DIGEST))
    return found


def _blocks(begin: int, end: int) -> int:
    return -(-(end - begin) // BLOCK)


class HashTree:
    """Verifies ranges of a content, each block once.

    Args:
        subject: the file, for messages.
        fetch: returns bytes `begin` to `end` of the content and its levels, or raises OSError.
        size: bytes of the content.
        root: as of `HashTreeBuilder.finish`.
    """

    def __init__(self, subject: object, fetch: Callable[[int, int], bytes], size: int, root: str) -> None:
        self._subject, self._fetch, self._root = subject, fetch, bytes.fromhex(root)
        self._spans = spans(size)
        self._known = [bytearray(_blocks(*span)) for span in self._spans]

    @property
    def read(self) -> int:
        """Bytes verified so far."""
        sizes = (end - begin for begin, end in self._spans)
        return sum(min(sum(known) * BLOCK, size) for known, size in zip(self._known, sizes, strict=True))

    def check(self, begin: int, end: int) -> None:
        """Verify bytes `begin` to `end` of the content.

        Raises:
            CheckpointError: they differ from the written ones, or cannot be read.
        """
        if begin < end:
            self._check(0, begin // BLOCK, _blocks(0, end))

    def check_share(self, share: tuple[int, int]) -> None:
        """Verify share (number, count) of the content, cut in equal parts."""
        blocks = len(self._known[0])
        self._check(0, *(blocks * number // share[1] for number in (share[0], share[0] + 1)))

    def _check(self, level: int, first: int, last: int) -> None:
        known, (begin, end) = self._known[level], self._spans[level]
        while (first := known.find(0, first, last)) >= 0:
            stop = known.find(1, first, min(last, first + AT_ONCE))
            stop = min(last, first + AT_ONCE) if stop < 0 else stop
            with reading(self._subject):
                found = self._fetch(begin + first * BLOCK, min(begin + stop * BLOCK, end))
            parts = (found[place : place + BLOCK] for place in range(0, (stop - first) * BLOCK, BLOCK))
            digests = b"".join(map(xxhash.xxh3_128_digest, parts))
            refuse_checksum(self._subject, digests, self._written(level, first, stop))
            known[first:stop] = b"\1" * (stop - first)

    def _written(self, level: int, first: int, last: int) -> bytes:
        if level + 1 == len(self._spans):
            return self._root
        self._check(level + 1, first * DIGEST // BLOCK, _blocks(0, last * DIGEST))
        above = self._spans[level + 1][0]
        with reading(self._subject):
            return self._fetch(above + first * DIGEST, above + last * DIGEST)


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
    """Checksums and sizes that an index is verified by."""

    size: int  # bytes of the file
    header: str  # checksum of its header
    begin: int  # begin, end: bytes of the hash tree's content. The levels follow it.
    end: int
    root: str  # of the hash tree

    @classmethod
    def from_dict(cls, values: dict) -> "IndexSeal":
        """A seal as read from a file.

        Raises:
            ValueError, TypeError: the values are no seal.
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


def write_index(
    write: Callable[[bytes | memoryview], object],
    index: Merged | Index,
    parts: Iterable[np.ndarray],
    records: Sequence[FileRecord],
) -> IndexSeal:
    """Write an index as a stream. Returns its seal.

    Args:
        write: appends bytes to the file.
        parts: the rows, in consecutive parts.
        records: by the file numbers in the rows.
    """
    heads = {"groups": index.groups.tobytes(), "files": _rows_of(records).tobytes()}
    sizes = {**{name: len(part) for name, part in heads.items()}, "rows": len(index) * ROW.itemsize}
    content = spans(sum(sizes.values()))
    sizes["tree"] = content[-1][1] - content[0][1]
    start, _ = header(
        {name: (torch.uint8, (size,)) for name, size in sizes.items()}, {"vocabulary": index.vocabulary.to_json()}
    )
    write(start)
    builder = HashTreeBuilder()

    def append(part: bytes | memoryview) -> None:
        builder.add(part)
        write(part)

    for part in heads.values():
        append(part)
    for rows in parts:
        append(rows.view(np.uint8).data)
    levels, root = builder.finish()
    write(levels)
    begin = len(start)
    return IndexSeal(begin + content[-1][1], checksum(start), begin, begin + content[0][1], root)


def read_index(
    path: Path, seal: IndexSeal, share: tuple[int, int] | None = (0, 1)
) -> tuple[Index, Sequence[FileRecord]]:
    """Map a written index: its fragments, and the records of its files.

    Args:
        share: the part (number, count) that is verified now. None verifies only on use. The header and the groups are
            always verified.

    Raises:
        CheckpointError: it is missing or damaged. Reading rows later may raise it, too.
    """
    with reading(path), understanding(path):
        file = _MappedFile(path)
        refuse_size(path, len(file.data), seal.size)
        start = file.fetch(0, seal.begin)
        refuse_checksum(path, checksum(start), seal.header)
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
    """A mapped file. Tables are read before the mapping is touched: a page that the disk cannot provide kills the
    process."""

    def __init__(self, path: Path) -> None:
        handle = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, handle)
        self._handle = handle
        self.data = memoryview(mmap.mmap(handle, 0, access=mmap.ACCESS_READ) if os.fstat(handle).st_size else b"")

    def fetch(self, begin: int, end: int, base: int = 0) -> bytes:
        """Bytes `begin` to `end`, counted from `base`. Fewer where the file has become shorter."""
        found = bytearray(end - begin)
        count = read_fully(self._handle, memoryview(found), base + begin)
        return bytes(found[:count])


_TABLES = {"groups": GROUP, "files": FILE, "rows": ROW}


class _Table:
    """An entry of the file as an array, and the check of its rows."""

    def __init__(self, data: memoryview, entry: TensorEntry, dtype: np.dtype, seal: IndexSeal, tree: HashTree) -> None:
        if not seal.begin <= entry.begin <= entry.end <= seal.end:
            raise ValueError("a table of the index lies outside of its hash tree")
        self.rows = np.frombuffer(data[entry.begin : entry.end], dtype)
        self._place, self._tree = entry.begin - seal.begin, tree

    @property
    def trust(self) -> Trust:
        size, place, tree = self.rows.itemsize, self._place, self._tree
        return lambda begin, end: tree.check(place + begin * size, place + end * size)


class StoredRecords(Sequence[FileRecord]):
    """The records in an index. Each is read and verified on access."""

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
