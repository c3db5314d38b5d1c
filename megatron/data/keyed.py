"""Randomness by key: each draw depends on its purpose, not on the number of draws before it."""

from __future__ import annotations

import hashlib

import numpy as np


def key_of(*purpose: int | str) -> int:
    """A 64-bit key for a purpose, e.g. `key_of(seed, "fim", sample)`."""
    text = "\x1f".join(f"{type(each).__name__}:{each}" for each in purpose)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def generator(*purpose: int | str) -> np.random.Generator:
    """A counter-based generator (Philox) for a purpose."""
    return np.random.Generator(np.random.Philox(key=key_of(*purpose)))
