"""The index: the part of a logical tensor that each stored fragment is.

Rows are sorted by (tensor, state, tensor rank, start). A group for each state of each tensor has its first row. The
number of groups depends on the model only. To read ten tensors of a very large checkpoint, a rank finds their groups
and reads a few rows of each.

The rows of all ranks' files are merged in memory of constant size. They are sorted in batches. With more than one
batch, the sorted batches wait in an unnamed temporary file. The table is then merged part by part, a few groups at a
time."""

import errno
import os
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np
import xxhash

from megatron.parallel.layout.shard import LogicalTensor

from .durable import name_errors, read_fully, write_fully
from .errors import understanding
from .table import DTYPE_ORDER, ROW, Vocabulary

INDEX_NAME = "index.safetensors"

# One row per state of a tensor: 20 bytes.
GROUP = np.dtype([("tensor", "<i4"), ("state", "<i2"), ("dtype", "<i2"), ("tensor_ranks", "<i4"), ("first", "<i8")])
MOST_RANKS = 1 << 16  # tensor parallel ranks of a tensor. A reader asks for each one's part

Trust = Callable[[int, int], None]  # raises unless rows `begin` to `end` are what was written
Key = Callable[[np.void], tuple[int, int]]


class Run:
    """The fragments of one state of one tensor, by (tensor rank, start). Rows are read on access only.

    Attributes:
        tensor: as it was stored.
        ranks: number of tensor parallel ranks that it is cut over.
    """

    def __init__(
        self, tensor: LogicalTensor, ranks: int, rows: np.ndarray, trust: Trust, span: tuple[int, int]
    ) -> None:
        self.tensor, self.ranks = tensor, ranks
        self._rows, self._trust, self._begin, self._end = rows, trust, *span

    def __len__(self) -> int:
        return self._end - self._begin

    def __getitem__(self, number: int) -> np.void:
        if not 0 <= number < len(self):
            raise IndexError(number)
        place = self._begin + number
        self._trust(place, place + 1)
        found: np.void = self._rows[place]
        return found

    def between(self, rank: int, low: int, high: int) -> np.ndarray:
        """Rows of a tensor rank that hold elements `low` to `high` of its flattened shard."""
        size = max(1, prod(self.tensor.local_shape(rank, self.ranks)))
        expected = (rank * size + low) * len(self) // (self.ranks * size)  # where equal pieces are
        first = self._first((rank, low + 1), lambda row: (row["tensor_rank"], row["start"] + row["length"]), expected)
        last = self._first((rank, high), lambda row: (row["tensor_rank"], row["start"]), first)
        self._trust(self._begin + first, self._begin + last)
        return self._rows[self._begin + first : self._begin + last]

    def _first(self, least: tuple[int, int], key: Key, near: int) -> int:
        """The first row whose key is at least `least`. The search window grows around `near`: a plain bisection would
        touch rows all over the file."""
        low, high, step = near, near, 1
        while low > 0 and key(self[low - 1]) >= least:
            high, low, step = low - 1, max(0, low - step), 2 * step
        while high < len(self) and key(self[high]) < least:
            low, high, step = high + 1, min(len(self), high + step), 2 * step
        return bisect_left(self, least, low, high, key=key)


class Index:
    """Stored fragments of all ranks.

    Attributes:
        vocabulary: tensors and states that the rows refer to.
        groups: array of `GROUP`, sorted.
    """

    def __init__(
        self,
        words: Vocabulary,
        rows: np.ndarray,
        groups: np.ndarray | None = None,
        trust: Trust = lambda begin, end: None,
    ) -> None:
        """`rows` are sorted. Without `groups` all of them are read. Rows made in this process need no `trust`."""
        self.vocabulary = words
        self.groups = groups_of(rows) if groups is None else groups
        self._rows, self._trust = rows, trust
        ends = [*self.groups["first"][1:].tolist(), len(rows)]
        self._stored = {
            (words.tensors[tensor].name, words.states[state]): (DTYPE_ORDER[dtype], tensor, ranks, first, end)
            for (tensor, state, dtype, ranks, first), end in zip(self.groups.tolist(), ends, strict=True)
        }

    def __len__(self) -> int:
        """Number of fragments."""
        return len(self._rows)

    @property
    def rows(self) -> np.ndarray:
        """All rows, an array of `table.ROW`."""
        self._trust(0, len(self._rows))
        return self._rows

    def find(self, name: str, state: str) -> Run | None:
        """The fragments of one state of one tensor. None if it is not stored."""
        if (name, state) not in self._stored:
            return None
        _, tensor, ranks, first, end = self._stored[name, state]
        return Run(self.vocabulary.tensors[tensor], ranks, self._rows, self._trust, (first, end))

    def stored(self) -> dict[tuple[str, str], str]:
        """(tensor name, state) -> safetensors name of the type, for everything stored."""
        return {key: dtype for key, (dtype, *_) in self._stored.items()}


def groups_of(rows: np.ndarray) -> np.ndarray:
    """The groups of sorted rows."""
    after, before = rows[1:], rows[:-1]
    change = (after["tensor"] != before["tensor"]) | (after["state"] != before["state"])
    first = np.append(0, np.flatnonzero(change) + 1)[: len(rows)]
    groups = np.empty(len(first), GROUP)
    for name in ("tensor", "state", "dtype", "tensor_ranks"):
        groups[name] = rows[name][first]
    groups["first"] = first
    return groups


def checksum(content: bytes) -> str:
    """128 bits of xxh3: 29 GB/s on one core, where SHA-256 has 1.8. It detects faults, not attacks."""
    return xxhash.xxh3_128_hexdigest(content)


def refuse_strange(groups: np.ndarray, vocabulary: Vocabulary, rows: int) -> None:
    """Raise ValueError for malformed groups."""
    first = groups["first"]
    ordered = np.all(first[1:] > first[:-1]) and (not len(first) or (first[0] == 0 and first[-1] < rows))
    negative = any((groups[name] < 0).any() for name in ("tensor", "state", "dtype"))
    ranks = groups["tensor_ranks"]
    if not ordered or negative or bool(rows) != bool(len(first)) or ((ranks < 1) | (ranks > MOST_RANKS)).any():
        raise ValueError("its table and its list of tensors do not agree")
    if len(first) and groups["tensor"].max() >= len(vocabulary.tensors):
        raise ValueError("its list of tensors has more than its vocabulary")
    shards = [tensor.shard for tensor in vocabulary.tensors]
    columns = np.array([1 if shard is None else shard.columns for shard in shards], dtype=np.int64)
    if len(first) and ((ranks % columns[groups["tensor"]] > 0) & (ranks > 1)).any():  # one rank has the whole
        raise ValueError("a tensor has columns that do not divide its tensor parallel ranks")


BATCH = 1 << 16  # rows that are sorted at once: 3.4 MB, and a few times that while sorting
VOCABULARIES = 64  # parsed ones that are cached. Neighbouring ranks share a few


@dataclass
class _Batch:
    """Sorted rows."""

    keys: np.ndarray  # of each group in the batch, increasing
    bounds: np.ndarray  # first row of each group, then the number of rows
    groups: np.ndarray  # as of an index with only these rows
    rows: np.ndarray | None  # None if they are in the file at `place`
    place: int = 0  # first byte of the rows in the file


class Merged:
    """The merged rows of several files. A context manager, which frees the temporary disk space.

    Attributes:
        vocabulary: of all files.
        groups: array of `index.GROUP`, sorted.
    """

    def __init__(
        self, pieces: Iterable[tuple[str, np.ndarray]], folder: Path, name: Callable[[int], str] = "file {}".format
    ) -> None:
        """Args:
            pieces: (vocabulary as JSON, rows) of each file, by file number. Read one at a time.
            folder: folder of the temporary file.
            name: name of the file with a given number, for messages.

        Raises:
            CheckpointError: a file's vocabulary is damaged or contradicts the files before it.
            OSError: the disk is full, ...
        """
        self.vocabulary = Vocabulary()
        self._folder, self._written = folder, 0
        self._name = name
        self._file: IO[bytes] | None = None
        self._numbers = lru_cache(VOCABULARIES)(self._take)
        self._batches: list[_Batch] = []
        try:
            self._sort(pieces)
        except BaseException:
            self._close()
            raise
        keys, where, group = np.unique(
            np.concatenate([batch.keys for batch in self._batches]), return_index=True, return_inverse=True
        )
        sizes = np.bincount(group, np.concatenate([np.diff(batch.bounds) for batch in self._batches])).astype(np.int64)
        self._keys, self._bounds = keys, np.append(0, np.cumsum(sizes))
        self.groups = np.concatenate([batch.groups for batch in self._batches])[where]
        self.groups["first"] = self._bounds[:-1]

    def __len__(self) -> int:
        """Rows."""
        return int(self._bounds[-1])

    def __enter__(self) -> "Merged":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def parts(self) -> Iterator[np.ndarray]:
        """All rows in order. A group is never split over two parts."""
        begin = 0
        while begin < len(self._keys):
            fitting = np.searchsorted(self._bounds, self._bounds[begin] + BATCH, side="right") - 1
            end = max(begin + 1, int(fitting))
            found = [self._rows(batch, self._keys[begin], self._keys[end - 1]) for batch in self._batches]
            yield found[0] if len(found) == 1 else _in_order(np.concatenate(found))
            begin = end

    def _sort(self, pieces: Iterable[tuple[str, np.ndarray]]) -> None:
        waiting, count = list[np.ndarray](), 0
        for number, (text, rows) in enumerate(pieces):
            if waiting and count + len(rows) > BATCH:
                self._batches.append(_batch(waiting))
                self._put_away(self._batches[-1])
                waiting, count = [], 0
            renamed = self._renamed(number, text, rows)
            waiting.append(renamed)
            count += len(rows)
        self._batches.append(_batch(waiting))

    def _renamed(self, number: int, text: str, rows: np.ndarray) -> np.ndarray:
        renamed = rows.copy()
        with understanding(self._name(number)):
            tensors, states = self._numbers(text)
            renamed["tensor"], renamed["state"] = tensors[rows["tensor"]], states[rows["state"]]
        renamed["file"] = number
        return renamed

    def _take(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of a file's tensors and states in the common vocabulary."""
        local = Vocabulary.from_json(text)
        return (
            np.array([self.vocabulary.tensor(tensor) for tensor in local.tensors], dtype=np.int32),
            np.array([self.vocabulary.state(state) for state in local.states], dtype=np.int16),
        )

    def _put_away(self, batch: _Batch) -> None:
        assert batch.rows is not None
        with name_errors(self._folder):
            self._file = self._file or tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115
            write_fully(self._file.fileno(), batch.rows.view(np.uint8).data)
        batch.rows, batch.place = None, self._written
        self._written += int(batch.bounds[-1]) * ROW.itemsize

    def _rows(self, batch: _Batch, low: np.int64, high: np.int64) -> np.ndarray:
        first, last = np.searchsorted(batch.keys, low), np.searchsorted(batch.keys, high, side="right")
        begin, end = int(batch.bounds[first]), int(batch.bounds[last])
        if batch.rows is not None:
            return batch.rows[begin:end]
        assert self._file is not None
        rows = np.empty(end - begin, ROW)
        with name_errors(self._folder):
            content = rows.view(np.uint8).data
            if read_fully(self._file.fileno(), content, batch.place + begin * ROW.itemsize) < len(content):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rows

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()


def _batch(waiting: list[np.ndarray]) -> _Batch:
    rows = _in_order(np.concatenate([np.empty(0, ROW), *waiting]))
    groups = groups_of(rows)
    keys = groups["tensor"].astype(np.int64) << 16 | groups["state"]
    return _Batch(keys, np.append(groups["first"], len(rows)), groups, rows)


def _in_order(rows: np.ndarray) -> np.ndarray:
    return rows[np.lexsort((rows["start"], rows["tensor_rank"], rows["state"], rows["tensor"]))]
