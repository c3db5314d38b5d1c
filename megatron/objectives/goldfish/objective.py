"""The goldfish loss: some labels never count, so that no passage can be learned by heart as a whole.

Hans et al., "Be like a Goldfish, Don't Memorize!" (2024), arXiv 2406.10209. The model still reads a masked label as
input. The loss is the mean over the labels that count."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Literal, Self

import numpy as np

from ..contract import Objective

if TYPE_CHECKING:
    from megatron.config import Config

Mask = Literal["hashed", "static", "reference"]

_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no token of a window is multiplied away
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # of splitmix64's finaliser
_TABLE_SIZE, _TABLE_SEED = 1_000_003, 2971215073  # of the reference


class Goldfish(Objective):
    """Masks one label of k.

    Args:
        k: one label of k is masked.
        h: number of tokens before a label that decide (reference: the last h labels, itself included).
        mask: `hashed`: by a hash of the h tokens before the label in its document. A passage that occurs again loses
            the same labels again, except its first h. `static`: labels 0, k, 2k, ... of each sample. `reference`: as in
            the authors' program (`hash-table`). Its windows cross the ends of documents and begin again in each sample.
            All windows that have id 0 are decided alike.
    """

    weighs = True

    def __init__(self, k: int, h: int, mask: Mask = "hashed") -> None:
        self.k, self.h, self.mask = k, h, mask
        self.needs_documents = mask == "hashed"
        self.context = h if mask == "hashed" else 0

    @classmethod
    def build(cls, config: Config) -> Self:
        section = config.objective
        return cls(section.k, section.h, section.mask)

    def weights(self, tokens: np.ndarray, begins: np.ndarray | None) -> np.ndarray:
        """0 for masked labels, 1 for others. See `Objective.weights`."""
        kept = {"hashed": self._hashed, "static": self._static, "reference": self._reference}[self.mask]
        return kept(tokens, begins)[1:].astype(np.float32)

    def _static(self, tokens: np.ndarray, begins: np.ndarray | None) -> np.ndarray:
        return np.arange(len(tokens)) % self.k != 1 % self.k  # token 1 is label 0

    def _hashed(self, tokens: np.ndarray, begins: np.ndarray | None) -> np.ndarray:
        """A token's window is the h tokens before it. The hash is a polynomial in their mixed ids, mixed once more."""
        kept = np.ones(len(tokens), bool)
        if (windows := len(tokens) - self.h) <= 0:
            return kept
        mixed, hashes = _mix(tokens.astype(np.uint64) + np.uint64(1)), np.zeros(windows, np.uint64)
        for place in range(self.h):
            hashes = hashes * _BASE + mixed[place : place + windows]
        kept[self.h :] = _mix(hashes) >= np.uint64(2**64 // self.k)
        if begins is not None:
            documents = np.cumsum(begins)
            kept[self.h :] |= documents[self.h :] != documents[:windows]  # its document has fewer than h tokens before
        return kept

    def _reference(self, tokens: np.ndarray, begins: np.ndarray | None) -> np.ndarray:
        """The product of the last h labels, which wraps around as int64, has a place in a table of random numbers."""
        kept, labels = np.ones(len(tokens), bool), tokens[1:].astype(np.int64)
        if len(labels) >= self.h:
            windows = np.lib.stride_tricks.sliding_window_view(labels, self.h)
            kept[self.h :] = _table()[np.multiply.reduce(windows, axis=1) % _TABLE_SIZE] >= np.float32(1 / self.k)
        return kept


def _mix(values: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: a bijection of 64 bits in which every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * _MULTIPLIERS[0]
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLIERS[1]
    return values ^ (values >> np.uint64(31))


@lru_cache(maxsize=1)
def _table() -> np.ndarray:
    """The reference's table, float32 [1000003], as torch's generator for CPUs draws it."""
    import torch

    return torch.rand(_TABLE_SIZE, generator=torch.Generator().manual_seed(_TABLE_SEED)).numpy()
