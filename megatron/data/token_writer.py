"""Write token files for GPT-NeoX and Megatron-LM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import numpy as np

from .errors import DataError
from .token_file import CODES, HEADER, MAGIC, prefix_of, with_ending

_CHUNK = 1 << 24


def write_index(file: BinaryIO, sizes: np.ndarray, dtype: np.dtype, document_index: np.ndarray | None = None) -> None:
    """Write an `.idx` of sequences with these numbers of tokens, each below 2**31.

    Args:
        document_index: first sequence of each document and the number of sequences. Default: each is a document.
    """
    dtype, count = np.dtype(dtype), len(sizes)
    entries = count + 1 if document_index is None else len(document_index)
    file.write(HEADER.pack(MAGIC, 1, CODES[dtype.newbyteorder("=")], count, entries))
    for first in range(0, count, _CHUNK):
        file.write(np.asarray(sizes[first : first + _CHUNK], dtype="<i4").tobytes())
    end = 0
    for first in range(0, count, _CHUNK):
        part = np.asarray(sizes[first : first + _CHUNK], dtype=np.int64) * dtype.itemsize
        ends = end + np.cumsum(part)
        file.write((ends - part).astype("<i8").tobytes())
        end = int(ends[-1])
    for first in range(0, entries, _CHUNK):
        last = min(first + _CHUNK, entries)
        part = np.arange(first, last) if document_index is None else document_index[first:last]
        file.write(np.asarray(part, dtype="<i8").tobytes())


def durable(file: BinaryIO) -> None:
    """Flush and fsync."""
    file.flush()
    os.fsync(file.fileno())


class TokenFileWriter:
    """Writes a pair document by document. The pair gets its name only when it is complete.

    Use as a context manager: an exception inside leaves no pair.
    """

    def __init__(self, path: str | os.PathLike, dtype: np.dtype | type):
        self.prefix, self.dtype = prefix_of(path), np.dtype(dtype)
        if self.dtype not in CODES:
            raise DataError(path, f"tokens cannot be stored as {self.dtype.name}", "use uint16 or int32")
        self._sizes: list[np.ndarray] = []
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self._part = with_ending(self.prefix, f".bin.{os.getpid()}")
        self._file: BinaryIO = open(self._part, "wb")
        self._limits = np.iinfo(self.dtype)
        self.documents = self.tokens = self.largest = 0

    def append(self, tokens: np.ndarray | list[int]) -> None:
        """Add one document, which may be empty."""
        array = np.asarray(tokens)
        self.extend(array, np.array([len(array)]))

    def extend(self, tokens: np.ndarray, sizes: np.ndarray) -> None:
        """Add several documents: their tokens back to back, and the size of each.

        Raises:
            DataError: an id is out of the token type's range, or the sizes do not add up.
        """
        tokens, sizes = np.asarray(tokens), np.asarray(sizes)
        if len(tokens) != int(sizes.sum()) or (sizes < 0).any():
            raise DataError(
                self.prefix,
                f"{len(tokens)} tokens do not fill documents of {int(sizes.sum())}",
                "give the size of each",
            )
        if len(tokens):
            low, high = int(tokens.min()), int(tokens.max())
            if low < self._limits.min or high > self._limits.max:
                raise DataError(self.prefix, f"ids {low} ... {high} do not fit into {self.dtype.name}", "use int32")
            self.largest = max(self.largest, high)
        self._file.write(np.ascontiguousarray(tokens, dtype=self.dtype.newbyteorder("<")).tobytes())
        self._sizes.append(sizes.astype(np.int32))
        self.documents += len(sizes)
        self.tokens += len(tokens)

    def finish(self) -> Path:
        """Complete the pair and rename it, the index last. Returns the prefix."""
        durable(self._file)
        self._file.close()
        index = with_ending(self.prefix, f".idx.{os.getpid()}")
        sizes = np.concatenate(self._sizes) if self._sizes else np.empty(0, np.int32)
        with open(index, "wb") as file:
            write_index(file, sizes, self.dtype)
            durable(file)
        with_ending(self.prefix, ".idx").unlink(missing_ok=True)
        os.replace(self._part, with_ending(self.prefix, ".bin"))
        os.replace(index, with_ending(self.prefix, ".idx"))
        return self.prefix

    def abandon(self) -> None:
        """Remove the unfinished files."""
        self._file.close()
        self._part.unlink(missing_ok=True)

    def __enter__(self) -> TokenFileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.abandon()
