"""Distinct n-grams of a set of sequences, and the places of a long sequence that have one of them.

Hashes only find candidates; each is compared word by word with the n-gram itself, so the answers are exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BLOCK = 1 << 16  # places that are hashed together
FILTER_BITS = 22  # of a hash; a table says which of their values occur, so that most places need no search


class NgramIndex:
    """The distinct n-grams of sequences of numbers, sorted by hash.

    Memory: 4n + 8 bytes for each, and 4 MiB.

    Args:
        sequences: int32 arrays of numbers from 1 to `largest`.
        n: numbers in an n-gram.

    Attributes:
        grams: int32 [count, n].
        of: for each sequence, the row of each of its n-grams, in order; empty where it is shorter than n.
    """

    def __init__(self, sequences: Sequence[np.ndarray], n: int, largest: int) -> None:
        self.n = n
        lengths = [max(len(each) - n + 1, 0) for each in sequences]
        windows = [np.lib.stride_tricks.sliding_window_view(each, n) for each in sequences if len(each) >= n]
        every = np.concatenate(windows) if windows else np.empty((0, n), np.int32)
        for seed in range(64):  # until no two n-grams have the same hash
            self._draw(seed, largest)
            self.hashes, first, inverse = np.unique(self._hash(every), return_index=True, return_inverse=True)
            self.grams = every[first]
            if all(
                np.array_equal(every[at : at + BLOCK], self.grams[inverse[at : at + BLOCK]])
                for at in range(0, len(every), BLOCK)
            ):
                break
        else:
            raise AssertionError("64 hash functions in a row have collided, which cannot be chance")
        self.of = np.split(inverse.astype(np.int64), np.cumsum(lengths)[:-1]) if sequences else []
        self._occurs = np.zeros(1 << FILTER_BITS, bool)
        self._occurs[self.hashes >> np.uint64(64 - FILTER_BITS)] = True

    def __len__(self) -> int:
        return len(self.grams)

    def _draw(self, seed: int, largest: int) -> None:
        """A random hash function: the sum of the numbers' random values, each times an odd factor of its place."""
        generator = np.random.Generator(np.random.PCG64(seed))
        self._values = generator.integers(0, 1 << 64, largest + 1, np.uint64)
        self._factors = generator.integers(0, 1 << 64, self.n, np.uint64) | np.uint64(1)

    def _hash(self, grams: np.ndarray) -> np.ndarray:
        total = np.zeros(len(grams), np.uint64)
        for place in range(self.n):
            total += self._values[grams[:, place]] * self._factors[place]
        total ^= total >> np.uint64(32)
        total *= np.uint64(0x9E3779B97F4A7C15)
        return total

    def find(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The places of a sequence at which one of the n-grams begins, and its row.

        Args:
            numbers: int32; 0 for what no n-gram has.

        Returns:
            Two int64 arrays of equal length, places ascending.
        """
        nothing = np.empty(0, np.int64)
        if len(numbers) < self.n or not len(self):
            return nothing, nothing
        foreign = np.concatenate([[0], np.cumsum(numbers == 0)])
        candidates = np.flatnonzero(foreign[self.n :] == foreign[: -self.n])
        windows = np.lib.stride_tricks.sliding_window_view(numbers, self.n)
        places, rows = [nothing], [nothing]
        for first in range(0, len(candidates), BLOCK):
            at = candidates[first : first + BLOCK]
            hashes = self._hash(windows[at])
            likely = self._occurs[hashes >> np.uint64(64 - FILTER_BITS)]
            at, hashes = at[likely], hashes[likely]
            row = np.minimum(np.searchsorted(self.hashes, hashes), len(self) - 1)
            same = (self.grams[row] == windows[at]).all(axis=1)
            places.append(at[same])
            rows.append(row[same])
        return np.concatenate(places), np.concatenate(rows)
