"""Sample orders: the tokens and documents of sample k of one source.

An order knows nothing of files' contents, blends or layouts. GPT-NeoX's order is in `pythia.py`, packing in
`packing.py`.

A pseudo-random permutation is a Feistel network on the smallest power of four of at least n. Indices outside of the
range are permuted again until they are inside (cycle walking, fewer than four rounds on average)."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from megatron.config.arithmetic.batches import document_bounds

from ..errors import DataError
from ..hashing import key_of
from ..token_file import TokenFile

ROUNDS = 8
_MASK = (1 << 64) - 1
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64's finaliser


def _mix(value: int) -> int:
    """splitmix64's finaliser: a bijection of 64 bits in which every input bit reaches every output bit."""
    value = ((value ^ (value >> 30)) * _MULTIPLIERS[0]) & _MASK
    value = ((value ^ (value >> 27)) * _MULTIPLIERS[1]) & _MASK
    return value ^ (value >> 31)


def _mix_many(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MULTIPLIERS[0])
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MULTIPLIERS[1])
    return values ^ (values >> np.uint64(31))


class Permutation:
    """The permutation of 0 ... size-1 for a purpose, e.g. `Permutation(size, seed, "stream", epoch)`."""

    def __init__(self, size: int, *purpose: int | str):
        self.size = size
        self.bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self.keys = [key_of(*purpose, each) for each in range(ROUNDS)]
        self._half = (1 << self.bits) - 1

    def __call__(self, index: int) -> int:
        """Image of an index, 0 <= index < size."""
        while True:
            left, right = index >> self.bits, index & self._half
            for key in self.keys:
                left, right = right, left ^ (_mix(right ^ key) & self._half)
            index = left << self.bits | right
            if index < self.size:
                return index

    def inverse(self, image: int) -> int:
        """The index with this image."""
        while True:
            left, right = image >> self.bits, image & self._half
            for key in reversed(self.keys):
                left, right = right ^ (_mix(left ^ key) & self._half), left
            image = left << self.bits | right
            if image < self.size:
                return image

    def many(self, indices: np.ndarray) -> np.ndarray:
        """`__call__` for an array, int64."""
        values = np.asarray(indices, dtype=np.uint64).copy()
        pending = np.arange(len(values))
        bits, half = np.uint64(self.bits), np.uint64(self._half)
        while len(pending):
            left, right = values[pending] >> bits, values[pending] & half
            for key in self.keys:
                left, right = right, left ^ (_mix_many(right ^ np.uint64(key)) & half)
            values[pending] = left << bits | right
            pending = pending[values[pending] >= self.size]
        return values.astype(np.int64)


class TokenRange(NamedTuple):
    """Tokens start ... start + length of a document."""

    document: int
    start: int
    length: int


class Lookup:
    """Finds values in an array: by scanning it, and by an index from the ninth call on."""

    SCANS = 8

    def __init__(self, values: np.ndarray):
        self.values, self._asked = values, 0

    def places(self, wanted: Iterable[int]) -> np.ndarray:
        """Ascending positions of any of the values."""
        wanted, self._asked = np.fromiter(wanted, np.int64), self._asked + 1
        if self._asked <= self.SCANS:
            return np.flatnonzero(np.isin(self.values, wanted))
        order, ascending = self._index
        low, high = (np.searchsorted(ascending, wanted, side) for side in ("left", "right"))
        return np.sort(np.concatenate([order[:0], *(order[begin:end] for begin, end in zip(low, high))]))

    @cached_property
    def _index(self) -> tuple[np.ndarray, np.ndarray]:
        order = np.argsort(self.values, kind="stable")
        return order, self.values[order]


class Order(ABC):
    """The order of one source's samples."""

    length: int  # samples until the order repeats itself or, if `endless`, until its next epoch
    endless: bool = False  # whether each pass has a new order. Otherwise sample k is sample k mod length.
    tokens: int  # tokens of the source in one epoch
    description: str  # one line for the user

    @abstractmethod
    def spans(self, sample: int) -> list[TokenRange]:
        """The pieces of sample k, back to back: S+1 tokens, or fewer where packing leaves room."""

    @abstractmethod
    def find(self, document: int, below: int) -> Iterator[int]:
        """All samples k < `below` that have tokens of a document, ascending within a pass."""


def with_repeats(found: list[int], length: int, pieces: int, below: int) -> Iterator[int]:
    """Samples of the first pass that were found, then their repetitions: sample k is sample k mod `length` later."""
    yield from (sample for sample in found if sample < below)
    for epoch in range(1, -(-below // length)):
        repeated = (epoch * length + sample for sample in found if sample < length)
        yield from (sample for sample in repeated if pieces <= sample < below)


def too_small(file: TokenFile, tokens: int, sequence_length: int) -> DataError:
    return DataError(
        file.prefix,
        f"its {tokens} tokens do not fill one sample of {sequence_length} + 1 tokens",
        "use a larger file or a smaller training.sequence_length",
    )


class SequentialOrder(Order):
    """The file's own order, pass after pass.

    In files whose documents all have exactly S+1 tokens, document k is sample k (Pythia publishes such pre-shuffled
    files). Otherwise sample k is tokens k*S ... k*S + S of the concatenated documents. Neighbours share one token."""

    def __init__(self, file: TokenFile, first: int, last: int, sequence_length: int):
        """Of documents first ... last-1."""
        self.file, self.first, self.last, self.sequence_length = file, first, last, sequence_length
        self.tokens = file.tokens_of(first, last)
        self.rows = file.all_have(sequence_length + 1, first, last)
        self.length = last - first if self.rows else (self.tokens - 1) // sequence_length
        if self.length < 1:
            raise too_small(file, self.tokens, sequence_length)
        self.description = "the file's documents are the samples" if self.rows else "the file's own order"
        self._stride = sequence_length + 1 if self.rows else sequence_length
        self._base = int(file.offsets[first]) // file.dtype.itemsize

    def place(self, sample: int) -> int:
        """The piece of the file that is sample k."""
        return sample % self.length

    def sample_at(self, place: int, epoch: int) -> int:
        """The sample that is a piece of the file in an epoch."""
        return epoch * self.length + place

    def spans(self, sample: int) -> list[TokenRange]:
        position = self._base + self.place(sample) * self._stride
        missing, spans = self.sequence_length + 1, []
        for document, begin, size in self.file.documents_from(position, self.first, self.last):
            offset = max(position - begin, 0)
            length = min(missing, size - offset)
            if length > 0:
                spans.append(TokenRange(document, offset, length))
                missing -= length
            if not missing:
                break
        return spans

    def find(self, document: int, below: int) -> Iterator[int]:
        size = int(self.file.sizes[document])
        if size == 0 or not self.first <= document < self.last:
            return
        start = int(self.file.offsets[document]) // self.file.dtype.itemsize - self._base
        places = pieces_touching(start, size, self._stride, self.sequence_length + 1, self.length)
        for epoch in range(-(-below // self.length)):
            yield from sorted(sample for place in places if (sample := self.sample_at(place, epoch)) < below)


def pieces_touching(start: int, size: int, stride: int, width: int, count: int) -> range:
    """Pieces j < count, each tokens j*stride ... j*stride + width, that overlap tokens start ... start + size."""
    return range(max(0, -(-(start - width + 1) // stride)), min(count, (start + size - 1) // stride + 1))


class StreamOrder(SequentialOrder):
    """The pieces of the file in a keyed pseudo-random order, a new one each epoch, without an index.

    Unlike the pythia order it does not shuffle documents before the cut: neighbours in the file share a sample."""

    endless = True

    def __init__(self, file: TokenFile, first: int, last: int, sequence_length: int, seed: int):
        super().__init__(file, first, last, sequence_length)
        self.permutation = lru_cache(4)(lambda epoch: Permutation(self.length, seed, "stream", epoch))
        self.description = f"keyed permutation of the file's {'samples' if self.rows else 'pieces'}"

    def place(self, sample: int) -> int:
        epoch, index = divmod(sample, self.length)
        return self.permutation(epoch)(index)

    def sample_at(self, place: int, epoch: int) -> int:
        return epoch * self.length + self.permutation(epoch).inverse(place)


class WindowOrder(StreamOrder):
    """Pieces shuffled inside windows of the file in the first epoch, and all together in later ones.

    A window is permuted by a key of (seed, its first piece). A sample of the first epoch needs only the tokens up to
    the end of its window, so a stream of texts has this order too. The first windows are small, each twice the one
    before, so that a stream soon has its first sample.

    Attributes:
        window: pieces of the largest windows.
    """

    FIRST = 64  # pieces of the first window

    def __init__(self, file: TokenFile, first: int, last: int, sequence_length: int, seed: int, window: int):
        self.file, self.first, self.last, self.sequence_length = file, first, last, sequence_length
        self.window = window
        self.permutation = lru_cache(4)(lambda epoch: Permutation(self.length, seed, "stream", epoch))
        self._inside = lru_cache(64)(lambda begin, size: Permutation(size, seed, "window", begin))
        self._base = 0 if first == 0 else int(file.offsets[first]) // file.dtype.itemsize
        self.description = f"keyed permutation of windows of up to {window:,} of the file's pieces"

    @cached_property
    def rows(self) -> bool:  # type: ignore[override]  # known when it is needed
        return self.file.all_have(self.sequence_length + 1, self.first, self.last)

    @cached_property
    def length(self) -> int:  # type: ignore[override]
        if (length := self._pieces()) < 1:
            raise too_small(self.file, self.tokens, self.sequence_length)
        return length

    @property
    def tokens(self) -> int:  # type: ignore[override]
        return self.file.tokens_of(self.first, self.last)

    @property
    def _stride(self) -> int:  # type: ignore[override]
        return self.sequence_length + self.rows

    def _pieces(self, wanted: int | None = None) -> int:
        """Number of pieces. Of a file that grows, at least the `wanted` ones, or all."""
        shared = not self.rows  # the last token of a piece, with the next one
        tokens = None if wanted is None else wanted * self._stride + shared
        return (self.file.tokens_of(self.first, self.last, tokens) - shared) // self._stride

    def bounds(self, piece: int) -> tuple[int, int]:
        """First piece and number of pieces of a piece's window, in a file without an end."""
        first = min(self.FIRST, self.window)
        small = first * (2 ** (self.window // first).bit_length() - 1)  # pieces of the windows that grow
        if piece < small:
            number = (piece // first + 1).bit_length() - 1
            return first * (2**number - 1), first * 2**number
        return small + (piece - small) // self.window * self.window, self.window

    def place(self, sample: int) -> int:
        begin, size = self.bounds(sample)
        known = self._pieces(begin + size)
        if known < begin + size:  # the file ends in this window, or before it
            if sample >= self.length:
                epoch, index = divmod(sample, self.length)
                return self.permutation(epoch)(index)
            size = self.length - begin
        return begin + self._inside(begin, size)(sample - begin)

    def sample_at(self, place: int, epoch: int) -> int:
        if epoch:
            return super().sample_at(place, epoch)
        begin, size = self.bounds(place)
        return begin + self._inside(begin, min(size, self.length - begin)).inverse(place - begin)


def split_bounds(shares: list[float], documents: int) -> list[int]:
    """GPT-NeoX's cut of documents into training, validation and test: four bounds, the first 0, the last `documents`.

    Args:
        shares: up to three numbers. Missing ones are 0, further ones are ignored.
    """
    shares = ([float(share) for share in shares] + [0.0, 0.0, 0.0])[:3]
    if sum(shares) <= 0 or min(shares) < 0:
        raise DataError("data.split", f"{shares} has no share above 0, or one below", "write it as in [969, 30, 1]")
    return document_bounds(shares, documents)
