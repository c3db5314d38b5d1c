"""Best-fit packing: documents stay whole, and samples are filled as well as possible (Ding et al., 2024).

Documents longer than a sample are cut into samples and a rest. Then pieces go, longest first, into the fullest sample
that still has room (best-fit decreasing). Pieces of one length are handled together, so the work grows with the number
of lengths, not of documents."""

import os
from bisect import bisect_left, insort
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from ..token_file import TokenFile
from .cache import Arrays, cached
from .order import Lookup, Order, Permutation, TokenRange, too_small


def pieces_of(sizes: np.ndarray, first: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut documents into pieces of at most `width` tokens.

    Returns:
        document (int64), start (int64) and length (int32) of each piece, in the order of the documents.
    """
    sizes = sizes.astype(np.int64)
    counts = -(-sizes // width)
    rows = np.repeat(np.arange(len(sizes)), counts)
    number = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = number * width
    return rows + first, starts, np.minimum(sizes[rows] - starts, width).astype(np.int32)


def best_fit(lengths: np.ndarray, width: int) -> np.ndarray:
    """Pack pieces into bins of `width`: the bin of each piece, int64. Bins are numbered as they are opened.

    Exactly best-fit decreasing. Pieces go by falling length, equal ones in their order. Each goes into the bin with the
    least room that takes it, of equal bins the latest to reach that room, else into a new one."""
    rank = (width - lengths).astype(np.uint16 if width < 2**16 else np.int32)  # 16 bits are sorted in linear time
    order = np.argsort(rank, kind="stable")
    counts = np.bincount(lengths, minlength=width + 1)
    bins = np.empty(len(lengths), np.int64)
    room: dict[int, list[np.ndarray]] = {}  # bins with this much room, as stacks of arrays
    levels: list[int] = []  # the keys of room, ascending
    opened, begin = 0, 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        end = begin + int(counts[length])
        while begin < end:
            level = bisect_left(levels, length)
            if level == len(levels):
                fits = width // length
                fresh = -(-(end - begin) // fits)
                taken, space = np.arange(opened, opened + fresh), width
                opened += fresh
            else:
                space = levels[level]
                fits = space // length
                taken = _take(room, levels, space, -(-(end - begin) // fits))
            placed = min(end - begin, len(taken) * fits)
            bins[order[begin : begin + placed]] = np.repeat(taken, fits)[:placed]
            begin += placed
            last = placed - (len(taken) - 1) * fits  # pieces in the bin that may not be full
            _give(room, levels, space - fits * length, taken if last == fits else taken[:-1])
            if last < fits:
                _give(room, levels, space - last * length, taken[-1:])
    return bins


def _take(room: dict[int, list[np.ndarray]], levels: list[int], space: int, wanted: int) -> np.ndarray:
    """Up to `wanted` bins with this much room, the latest first."""
    stack = room[space]
    top = stack.pop()
    if len(top) > wanted:
        stack.append(top[:-wanted])
        top = top[-wanted:]
    if not stack:
        del room[space]
        levels.remove(space)
    return top[::-1]


def _give(room: dict[int, list[np.ndarray]], levels: list[int], space: int, bins: np.ndarray) -> None:
    """Put bins back with their remaining room. Full ones are done."""
    if space == 0 or not len(bins):
        return
    if space not in room:
        room[space] = []
        insort(levels, space)
    room[space].append(bins)


def build_arrays(
    sizes: np.ndarray, first: int, last: int, width: int, apart: bool = False, drop_long: bool = False
) -> Arrays:
    """Pack documents first ... last-1 into samples of `width` tokens.

    Args:
        apart: each piece of a document is a sample of its own.
        drop_long: skip documents of more than `width` tokens.

    Returns:
        documents, starts, lengths: of the pieces, sample by sample, in a sample by document.
        bounds: int64 [samples + 1], each sample's first piece.
    """
    documents, starts, lengths = pieces_of(sizes[first:last], first, width)
    if drop_long:
        short = sizes[documents] <= width
        documents, starts, lengths = documents[short], starts[short], lengths[short]
    bins = np.arange(len(documents)) if apart else best_fit(lengths, width)
    order = np.argsort(bins, kind="stable")
    bounds = np.concatenate([[0], np.cumsum(np.bincount(bins))]) if len(bins) else np.zeros(1, np.int64)
    return {"documents": documents[order], "starts": starts[order], "lengths": lengths[order], "bounds": bounds}


class PackedOrder(Order):
    """Samples packed by best fit, shuffled again each epoch by a keyed permutation, or in packing order."""

    endless = True

    def __init__(
        self,
        file: TokenFile,
        first: int,
        last: int,
        sequence_length: int,
        seed: int | None,
        *,
        apart: bool = False,
        drop_long: bool = False,
        fingerprint: str | None = None,
        cache: str | os.PathLike | None = None,
    ):
        """Of documents first ... last-1. Without a seed, samples keep the order of packing. Options as of
        `build_arrays`."""
        self.tokens = file.tokens_of(first, last)
        options = (apart, drop_long) if apart or drop_long else ()
        key = () if cache is None else (fingerprint or file.fingerprint(), first, last, sequence_length, *options)
        width = sequence_length + 1
        arrays = cached(cache, "packing", key, lambda: build_arrays(file.sizes, first, last, width, apart, drop_long))
        self.documents, self.starts, self.lengths = arrays["documents"], arrays["starts"], arrays["lengths"]
        self.bounds, self._pieces = arrays["bounds"], Lookup(self.documents)
        self.length = len(self.bounds) - 1
        if self.length < 1:
            raise too_small(file, self.tokens, sequence_length)
        self.filled = int(self.lengths.sum(dtype=np.int64)) / (self.length * width)
        how = "one document in a sample" if apart else "whole documents packed by best fit"
        self.description = f"{how}, samples {100 * self.filled:.1f} % full"
        self._seeded = seed is not None
        key_of_draws = 0 if seed is None else seed  # without one nothing is drawn
        self.permutation = lru_cache(4)(lambda epoch: Permutation(self.length, key_of_draws, "packing", epoch))

    def spans(self, sample: int) -> list[TokenRange]:
        epoch, index = divmod(sample, self.length)
        place = self.permutation(epoch)(index) if self._seeded else index
        begin, end = int(self.bounds[place]), int(self.bounds[place + 1])
        return [
            TokenRange(int(self.documents[each]), int(self.starts[each]), int(self.lengths[each]))
            for each in range(begin, end)
        ]

    def find(self, document: int, below: int) -> Iterator[int]:
        pieces = self._pieces.places([document])
        places = sorted(set((np.searchsorted(self.bounds, pieces, side="right") - 1).tolist()))
        for epoch in range(-(-below // self.length)):
            found = (self.permutation(epoch).inverse(place) if self._seeded else place for place in places)
            yield from sorted(sample for place in found if (sample := epoch * self.length + place) < below)
