"""The index: the part of a logical tensor that each stored fragment is.

Rows are sorted by (tensor, state, tensor rank, start). A group for each state of each tensor has its first row. The
number of groups depends on the model only. To read ten tensors of a very large checkpoint, a rank finds their groups
and reads a few rows of each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from math import prod

import numpy as np
import xxhash

from ...parallel.layout.shard import LogicalTensor
from .table import DTYPE_ORDER, Vocabulary

INDEX_NAME = "index.safetensors"

# One row per state of a tensor: 20 bytes.
GROUP = np.dtype([("tensor", "<i4"), ("state", "<i2"), ("dtype", "<i2"), ("tensor_ranks", "<i4"), ("first", "<i8")])
MOST_RANKS = 1 << 16  # tensor parallel ranks of a tensor. A reader asks for each one's part

Trust = Callable[[int, int], None]  # raises unless rows `begin` to `end` are what was written
Key = Callable[[np.void], tuple[int, int]]


def _trusted(begin: int, end: int) -> None:
    """Rows made in this process need no check."""


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
        self, vocabulary: Vocabulary, rows: np.ndarray, groups: np.ndarray | None = None, trust: Trust = _trusted
    ) -> None:
        """`rows` are sorted. Without `groups` all of them are read."""
        self.vocabulary = vocabulary
        self.groups = groups_of(rows) if groups is None else groups
        self._rows, self._trust = rows, trust
        ends = [*self.groups["first"][1:].tolist(), len(rows)]
        self._stored = {
            (vocabulary.tensors[tensor].name, vocabulary.states[state]): (DTYPE_ORDER[dtype], tensor, ranks, first, end)
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
