"""The index: which part of which logical tensor each stored fragment is.

Rows are sorted by (tensor, state, tensor rank, start), with the place of each tensor's first row beside them, and
the file is mapped, not read: whoever needs ten tensors of a very large checkpoint touches the rows of those ten.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import torch
import xxhash

from .container import header, read_header
from .errors import CheckpointError, understanding
from .table import DTYPE_ORDER, ROW, Vocabulary

INDEX_NAME = "index.safetensors"


class Index:
    """Stored fragments of all ranks.

    Attributes:
        vocabulary: what tensors and states the rows refer to.
        rows: array of `ROW`, sorted.
    """

    def __init__(self, vocabulary: Vocabulary, rows: np.ndarray, first: np.ndarray | None = None) -> None:
        self.vocabulary = vocabulary
        self.rows = rows
        if first is None:
            first = np.searchsorted(rows["tensor"], np.arange(len(vocabulary.tensors) + 1))
        self._first = first

    @classmethod
    def merge(cls, pieces: list[tuple[str, np.ndarray]]) -> Index:
        """One index of every rank's own rows; `file` becomes the piece's number.

        Args:
            pieces: (vocabulary as JSON, rows) of each file.

        Raises:
            ValueError: two ranks mean different tensors by one name.
        """
        vocabulary, tables = Vocabulary(), []
        numbers: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # many ranks have the same vocabulary
        for number, (text, rows) in enumerate(pieces):
            if text not in numbers:
                local = Vocabulary.from_json(text)
                numbers[text] = (
                    np.array([vocabulary.tensor(tensor) for tensor in local.tensors], dtype=np.int32),
                    np.array([vocabulary.state(state) for state in local.states], dtype=np.int16),
                )
            tensors, states = numbers[text]
            renamed = rows.copy()
            renamed["tensor"], renamed["state"] = tensors[rows["tensor"]], states[rows["state"]]
            renamed["file"] = number
            tables.append(renamed)
        rows = np.concatenate(tables) if tables else np.empty(0, ROW)
        order = np.lexsort((rows["start"], rows["tensor_rank"], rows["state"], rows["tensor"]))
        return cls(vocabulary, rows[order])

    def find(self, name: str, state: str) -> np.ndarray:
        """Rows of one state of one tensor, sorted by (tensor rank, start); none if it is not stored."""
        numbers = self.vocabulary.find(name, state)
        if numbers is None:
            return self.rows[:0]
        rows = self.rows[self._first[numbers[0]] : self._first[numbers[0] + 1]]
        low, high = np.searchsorted(rows["state"], [numbers[1], numbers[1] + 1])
        return rows[low:high]

    def stored(self) -> dict[tuple[str, str], str]:
        """(tensor name, state) -> safetensors name of the type, for everything stored."""
        found = {}
        for number, tensor in enumerate(self.vocabulary.tensors):
            rows = self.rows[self._first[number] : self._first[number + 1]]
            for state in np.unique(rows["state"]):
                row = rows[np.searchsorted(rows["state"], state)]
                found[tensor.name, self.vocabulary.states[state]] = DTYPE_ORDER[row["dtype"]]
        return found

    def to_bytes(self) -> bytes:
        first = np.ascontiguousarray(self._first, dtype="<i8").tobytes()
        rows = np.ascontiguousarray(self.rows).tobytes()
        start, _ = header(
            {"first": (torch.int64, (len(first) // 8,)), "rows": (torch.uint8, (len(rows),))},
            {"vocabulary": self.vocabulary.to_json()},
        )
        return start + first + rows

    @classmethod
    def open(cls, path: Path) -> Index:
        """Map a written index.

        Raises:
            CheckpointError: it is damaged.
            OSError: it cannot be read.
        """
        entries, metadata = read_header(path)
        with understanding(path):
            vocabulary = Vocabulary.from_json(metadata["vocabulary"])
            first, rows = entries["first"], entries["rows"]
            with open(path, "rb") as file:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            table = np.frombuffer(content, ROW, count=(rows.end - rows.begin) // ROW.itemsize, offset=rows.begin)
            starts = np.frombuffer(content, "<i8", count=(first.end - first.begin) // 8, offset=first.begin)
        if len(starts) != len(vocabulary.tensors) + 1 or starts[-1] != len(table):
            raise CheckpointError(path, "the index is damaged: its table and its list of tensors do not agree")
        return cls(vocabulary, table, starts)


def checksum(content: bytes) -> str:
    """128 bits of xxh3: 29 GB/s on one core, where SHA-256 did 1.8; it is meant for faults, not for enemies."""
    return xxhash.xxh3_128_hexdigest(content)
