"""Megatron's token files: a `.bin` of consecutive tokens and a `.idx` with the position of each document.

`.idx`, little-endian, without padding:

    9 bytes  "MMIDIDX\\0\\0"
    u64      version, 1
    u8       code of the token type: 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 6 f32, 7 f64, 8 u16
    u64      number of sequences n
    u64      length of the document index
    i32[n]   sizes, in tokens
    i64[n]   byte offset of each sequence in the .bin: the running sum of the sizes
    i64[]    document index: the first sequence of each document, then n

Like GPT-NeoX's training data set, the readers here treat each sequence as a document."""

import os
import struct
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megatron.config.file_access import MISSING, unreadable

from .errors import DataError
from .hashing import content_hash

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float32, 7: np.float64, 8: np.uint16}
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
UINT16_VOCABULARY = 65500  # Megatron's own bound below which ids are stored in two bytes
REMAKE = "make the pair again, or copy it again from where it is intact"
_CHUNK = 1 << 24  # entries that are processed together


def prefix_of(path: str | os.PathLike) -> Path:
    """`path` without a `.bin` or `.idx` ending."""
    path = Path(path)
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def with_ending(prefix: str | os.PathLike, ending: str) -> Path:
    """`prefix` with an ending appended. Prefixes may contain dots."""
    return Path(f"{os.fspath(prefix)}{ending}")


def token_dtype(vocabulary: int) -> np.dtype:
    """The type in which ids below `vocabulary` are stored: uint16 below 65 500 ids, else int32."""
    return np.dtype(np.uint16 if vocabulary < UINT16_VOCABULARY else np.int32)


class TokenFile:
    """A `.bin/.idx` pair, memory mapped and read only.

    Attributes:
        prefix: the pair's path without the ending.
        dtype: type of the stored tokens.
        sizes: int32 [n], tokens of each document.
        offsets: int64 [n], byte offset of each document in the .bin.
        document_index: int64, the pair's own document index, which orders do not use.
    """

    def __init__(self, path: str | os.PathLike):
        """Open a pair and check the cheap facts: header, file lengths, end of the last document.

        Raises:
            DataError: a file is missing, truncated, damaged, or does not belong to the other.
        """
        self.prefix = prefix_of(path)
        self.bin_path, self.idx_path = with_ending(self.prefix, ".bin"), with_ending(self.prefix, ".idx")
        for file in (self.bin_path, self.idx_path):
            if reason := unreadable(file):
                if reason == MISSING:
                    reason = "this file of a .bin/.idx pair does not exist"
                raise DataError(file, reason, "give the path that both files have in common, without .bin or .idx")
        self._read_index()
        self._check_end()

    def _read_index(self) -> None:
        size = self.idx_path.stat().st_size
        with open(self.idx_path, "rb") as file:
            head = file.read(HEADER.size)
        if len(head) < HEADER.size or head[:9] != MAGIC:
            raise DataError(self.idx_path, "it does not start like a Megatron index (MMIDIDX)", REMAKE)
        _, version, code, count, entries = HEADER.unpack(head)
        if version != 1 or code not in DTYPES:
            known = f"the version must be 1, and the type 1 to {max(DTYPES)}"
            raise DataError(self.idx_path, f"version {version} with token type {code} is unknown: {known}", REMAKE)
        self.dtype = np.dtype(DTYPES[code]).newbyteorder("<")
        if self.dtype.kind not in "iu":
            raise DataError(self.idx_path, f"it holds {self.dtype.name}, not token ids", "give a file of tokens")
        expected = HEADER.size + 12 * count + 8 * entries
        if size != expected:
            raise DataError(self.idx_path, f"it has {size} bytes, but its header announces {expected}", REMAKE)
        sizes_end = HEADER.size + 4 * count
        # A plain array on the same memory has faster item access.
        data = np.memmap(self.idx_path, mode="r", dtype=np.uint8).view(np.ndarray)
        self.sizes = data[HEADER.size : sizes_end].view("<i4")
        self.offsets = data[sizes_end : sizes_end + 8 * count].view("<i8")
        self.document_index = data[sizes_end + 8 * count :].view("<i8")

    def _check_end(self) -> None:
        held = self.bin_path.stat().st_size
        end = int(self.offsets[-1]) + int(self.sizes[-1]) * self.dtype.itemsize if len(self) else 0
        if end != held:
            raise DataError(self.bin_path, f"it has {held} bytes, but its index ends at byte {end}", REMAKE)
        self.tokens = end // self.dtype.itemsize
        empty = np.empty(0, self.dtype)
        self._data = np.memmap(self.bin_path, mode="r", dtype=self.dtype).view(np.ndarray) if end else empty

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.sizes)

    def __getitem__(self, document: int) -> np.ndarray:
        """The tokens of one document, without a copy."""
        return self.read(document)

    def read(self, document: int, start: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens `start ... start + length` of a document (to its end without `length`), without a copy."""
        first = int(self.offsets[document]) // self.dtype.itemsize + start
        count = int(self.sizes[document]) - start if length is None else length
        return self._data[first : first + count]

    def starts(self, documents: np.ndarray | slice) -> np.ndarray:
        """Position of documents' first tokens in the .bin, in tokens, int64."""
        return self.offsets[documents] // self.dtype.itemsize

    def flat(self, start: int, length: int) -> np.ndarray:
        """`length` tokens of the whole file from token `start`, without a copy."""
        return self._data[start : start + length]

    def tokens_of(self, first: int, last: int, wanted: int | None = None) -> int:
        """Tokens of documents first ... last-1. Of a file that grows, at least the `wanted` ones, or all."""
        if first >= last:
            return 0
        end = int(self.offsets[last - 1]) // self.dtype.itemsize + int(self.sizes[last - 1])
        return end - int(self.offsets[first]) // self.dtype.itemsize

    def all_have(self, size: int, first: int, last: int) -> bool:
        """Whether documents first ... last-1 have `size` tokens each."""
        sizes = self.sizes[first:last]
        return last > first and int(sizes.min()) == int(sizes.max()) == size

    def documents_from(self, position: int, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Documents of first ... last-1 from the one that has a token of the .bin on: each document's number, first
        token and size."""
        width, offsets = self.dtype.itemsize, self.offsets
        for document in range(bisect_right(offsets, position * width, first, last) - 1, last):
            yield document, int(offsets[document]) // width, int(self.sizes[document])

    def verify(self) -> None:
        """Check every entry of the index: no negative size, and offsets that are the running sum of the sizes.

        Raises:
            DataError: with the first damaged document.
        """
        end = 0
        for first in range(0, len(self), _CHUNK):
            sizes = np.asarray(self.sizes[first : first + _CHUNK], dtype=np.int64)
            ends = end + np.cumsum(sizes) * self.dtype.itemsize
            starts = ends - sizes * self.dtype.itemsize
            wrong = (sizes < 0) | (self.offsets[first : first + _CHUNK] != starts)
            if wrong.any():
                raise DataError(self.idx_path, f"entry of document {first + int(np.argmax(wrong))} is damaged", REMAKE)
            end = int(ends[-1])
        index = self.document_index
        falling = any((np.diff(index[first : first + _CHUNK + 1]) < 0).any() for first in range(0, len(index), _CHUNK))
        if len(index) and (index[0] != 0 or index[-1] > len(self) or falling):
            raise DataError(self.idx_path, f"its document index must rise from 0 to at most {len(self)}", REMAKE)

    @property
    def note(self) -> str | None:
        """A remark on a valid pair, or None. GPT-NeoX's `merge_file_` adds sequences without extending the document
        index."""
        index = self.document_index
        if not len(index) or index[-1] == len(self):
            return None
        return (
            f"{self.idx_path}: its document index ends at sequence {int(index[-1]):,} of {len(self):,}, as GPT-NeoX's "
            "merging of files leaves it. Nothing is lost: each sequence is one document here, as in GPT-NeoX's training"
        )

    def extent(self) -> tuple[int, int]:
        """The smallest and largest token id, (0, 0) for an empty file. Reads everything."""
        low, high = 0, 0
        for first in range(0, self.tokens, _CHUNK):
            part = self._data[first : first + _CHUNK]
            low, high = min(low, int(part.min())), max(high, int(part.max()))
        return low, high

    def fingerprint(self) -> str:
        """Hash of the facts that the sample order depends on: the documents' sizes and the token type."""
        return content_hash(self.dtype.name, self.sizes)


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

    Use as a context manager: an exception inside leaves no pair."""

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
            rule = f"{len(tokens)} tokens do not fill documents of {int(sizes.sum())}"
            raise DataError(self.prefix, rule, "give the size of each")
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

    def __enter__(self) -> "TokenFileWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.abandon()
