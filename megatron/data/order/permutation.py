"""A keyed pseudo-random permutation of 0 ... n-1, computed for one index at a time, in both directions.

A Feistel network permutes the smallest power of four of at least n. Indices outside of the range are permuted again
until they are inside (cycle walking, fewer than four rounds on average).
"""

from __future__ import annotations

import numpy as np

from ..keyed import key_of

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
