"""GPT-NeoX's sample order, item for item as in version 1.0. Pythia was trained in it.

The documents of all epochs are shuffled together, concatenated, and cut into pieces of S tokens plus one for the last
label. Then the pieces are shuffled. Both shuffles draw from one `RandomState(seed)` (MT19937). The start of a piece is
found by searching the cumulated lengths. Every 16th of them is stored."""

import os
from collections.abc import Iterator

import numpy as np

from megatron.config.problems import counted

from ..errors import DataError
from ..token_file import TokenFile
from .cache import Arrays, cached
from .order import Lookup, Order, TokenRange, pieces_touching, too_small, with_repeats

STRIDE = 16  # entries of the shuffled documents between two kept starts
_CHUNK = STRIDE << 11  # documents whose sizes are added together, in the cache of a core
_WIDE = 1 << 26  # entries that are shuffled as 8 bytes each


def epochs_for(samples: int, tokens: int, sequence_length: int) -> int:
    """The fewest epochs of `tokens`, at least 1, from which `samples` pieces of S tokens, plus one label, can be cut.

    The last shuffled piece is never read, so at least two are made (GPT-NeoX fails on such small files)."""
    return max(1, -(-(max(samples, 2) * sequence_length + 1) // tokens))


def build_arrays(sizes: np.ndarray, first: int, last: int, sequence_length: int, seed: int, epochs: int) -> Arrays:
    """Make the order of documents first ... last-1.

    Returns:
        documents: int32 [epochs * (last-first)], all epochs shuffled together (GPT-NeoX's doc_idx).
        pieces: uint32 [N], the shuffled pieces (shuffle_idx). N = (epochs * tokens - 1) // S.
        starts: int64 [ceil(len(documents) / STRIDE)], tokens before every STRIDE-th entry of `documents`.
    """
    generator = np.random.RandomState(seed)
    count = last - first
    documents = np.empty(epochs * count, width_of(last, epochs * count))
    for begin in range(0, count, _CHUNK):
        end = min(begin + _CHUNK, count)
        for epoch in range(epochs):
            documents[epoch * count + begin : epoch * count + end] = np.arange(first + begin, first + end)
    generator.shuffle(documents)
    documents = narrowed(documents, np.int32 if last < 2**31 else np.int64)
    # an index of a token file is not aligned, and `take` would copy it whole for each chunk
    starts, tokens = block_starts(np.require(sizes, requirements=["C", "A"]), documents)
    number = (tokens - 1) // sequence_length
    pieces = np.arange(number, dtype=width_of(number, number))
    generator.shuffle(pieces)
    pieces = narrowed(pieces, np.uint32 if number < 2**32 - 2 else np.int64)
    return {"documents": documents, "pieces": pieces, "starts": starts}


def width_of(largest: int, count: int) -> type[np.signedinteger]:
    """The type in which to shuffle: numpy swaps entries of 8 bytes a quarter faster, where there is room for them."""
    return np.int64 if count < _WIDE or largest >= 2**31 else np.int32


def narrowed(values: np.ndarray, kind: type[np.integer]) -> np.ndarray:
    """Integers that fit into a type of at most their width, in their own memory: fresh pages cost more than the
    conversion."""
    if values.dtype.itemsize == np.dtype(kind).itemsize:
        return values.view(kind)
    made = values.view(kind)[: len(values)]
    for begin in range(0, len(values), _CHUNK):
        made[begin : begin + _CHUNK] = values[begin : begin + _CHUNK]
    return made


def block_starts(sizes: np.ndarray, documents: np.ndarray) -> tuple[np.ndarray, int]:
    """Tokens before every STRIDE-th document of a list, and all tokens."""
    blocks = np.zeros(-(-len(documents) // STRIDE) + 1, np.int64)  # the tokens of each, after a 0
    whole, row = len(documents) // STRIDE * STRIDE, np.empty(_CHUNK, sizes.dtype)
    for begin in range(0, whole, _CHUNK):
        end = min(begin + _CHUNK, whole)
        # `clip` writes to `out` directly. All documents are in range
        part = np.take(sizes, documents[begin:end], out=row[: end - begin], mode="clip").reshape(-1, STRIDE)
        np.add.reduce(part, 1, np.int64, out=blocks[begin // STRIDE + 1 : end // STRIDE + 1])
    if whole < len(documents):
        blocks[-1] = sizes[documents[whole:]].sum(dtype=np.int64)
    np.cumsum(blocks, out=blocks)
    return blocks[:-1], int(blocks[-1])


class PythiaOrder(Order):
    """The order of one source.

    Attributes:
        epochs: passes over the documents that are shuffled together.
        length: N-1, one less than the pieces, as in GPT-NeoX. Sample k is piece k for k < N, then piece k mod length.
            So sample `length` is the last piece, and only later samples are repetitions.
    """

    def __init__(
        self,
        file: TokenFile,
        first: int,
        last: int,
        sequence_length: int,
        seed: int,
        *,
        samples: int | None = None,
        epochs: int | None = None,
        fingerprint: str | None = None,
        cache: str | os.PathLike | None = None,
    ):
        """Of documents first ... last-1. Give either the number of samples that will be read, or the epochs.

        Args:
            fingerprint: the file's, from `cache.examine_once`. Computed here if needed.
            cache: folder of the arrays. None makes them in memory.
        """
        self.file, self.sequence_length = file, sequence_length
        self.first, self.last = first, last
        self.tokens = file.tokens_of(first, last)
        if self.tokens < 1:
            raise too_small(file, self.tokens, sequence_length)
        if not 0 <= seed < 2**32:
            raise DataError("data.seed", f"{seed} exceeds the 32 bits of the pythia order", "give a smaller data.seed")
        self.epochs = epochs_for(samples or 0, self.tokens, sequence_length) if epochs is None else epochs
        if (self.epochs * self.tokens - 1) // sequence_length < 2:
            raise too_small(file, self.epochs * self.tokens, sequence_length)
        settings = (first, last, sequence_length, seed, self.epochs)
        key = () if cache is None else (fingerprint or file.fingerprint(), *settings)
        arrays = cached(cache, "pythia", key, lambda: build_arrays(file.sizes, *settings))
        self.documents, self.pieces, self.starts = arrays["documents"], arrays["pieces"], arrays["starts"]
        self._entries, self._shuffled = Lookup(self.documents), Lookup(self.pieces)
        self.length = len(self.pieces) - 1
        self.description = f"GPT-NeoX's order, {counted(self.epochs, 'epoch')} shuffled together"

    def locate(self, piece: int) -> tuple[int, int]:
        """Entry of `documents` and offset in it where a piece begins. The next document if one ends just before."""
        position = piece * self.sequence_length
        block = int(np.searchsorted(self.starts, position, side="right")) - 1
        entry = block * STRIDE
        before = int(self.starts[block])
        sizes = self.file.sizes[self.documents[entry : entry + STRIDE]]
        cumulated = before + np.concatenate([[0], np.cumsum(sizes[:-1], dtype=np.int64)])
        inside = int(np.searchsorted(cumulated, position, side="right")) - 1
        return entry + inside, position - int(cumulated[inside])

    def spans(self, sample: int) -> list[TokenRange]:
        place = sample if sample < len(self.pieces) else sample % self.length
        entry, offset = self.locate(int(self.pieces[place]))
        missing, spans = self.sequence_length + 1, []
        while missing:
            document = int(self.documents[entry])
            length = min(missing, int(self.file.sizes[document]) - offset)
            if length > 0:
                spans.append(TokenRange(document, offset, length))
                missing -= length
            entry, offset = entry + 1, 0
        return spans

    def find(self, document: int, below: int) -> Iterator[int]:
        places: set[int] = set()
        for entry in self._entries.places([document]):
            block = int(entry) // STRIDE
            start = int(
                self.starts[block] + self.file.sizes[self.documents[block * STRIDE : entry]].sum(dtype=np.int64)
            )
            size = int(self.file.sizes[document])
            if size:
                places.update(
                    pieces_touching(start, size, self.sequence_length, self.sequence_length + 1, len(self.pieces))
                )
        yield from with_repeats(self._shuffled.places(places).tolist(), self.length, len(self.pieces), below)
