"""Hashes of batches and of contents, and randomness by key.

Each draw depends on its purpose, not on the number of draws before it."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

MODULUS = 1 << 64


def sample_hash(index: int, tokens: np.ndarray) -> int:
    """64-bit hash of one sample of a global batch.

    BLAKE2b with a digest of 8 bytes (little-endian), over the index as u64 and the tokens as u32, both little-endian.

    Args:
        index: the sample's place in the global batch, 0 <= index < B.
        tokens: the sample's token ids [S+1].
    """
    digest = hashlib.blake2b(int(index).to_bytes(8, "little"), digest_size=8)
    digest.update(np.ascontiguousarray(tokens, dtype="<u4").data)
    return int.from_bytes(digest.digest(), "little")


def batch_hash(hashes: Iterable[int]) -> int:
    """Hash of a batch or of a rank's part: the sum of sample hashes modulo 2**64, so parts add up."""
    return sum(hashes) % MODULUS


def content_hash(*parts: bytes | str | np.ndarray) -> str:
    """128-bit hash, in hexadecimal, of arrays and texts one after the other, with each part's length."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = _bytes(part)
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def _bytes(part: bytes | str | np.ndarray) -> bytes | memoryview:
    if isinstance(part, str):
        return part.encode()
    if isinstance(part, np.ndarray):
        return np.ascontiguousarray(part).data.cast("B") if part.size else b""
    return part


def file_hash(path: str | Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def key_of(*purpose: int | str) -> int:
    """A 64-bit key for a purpose, e.g. `key_of(seed, "fim", sample)`."""
    text = "\x1f".join(f"{type(each).__name__}:{each}" for each in purpose)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def generator(*purpose: int | str) -> np.random.Generator:
    """A counter-based generator (Philox) for a purpose."""
    return np.random.Generator(np.random.Philox(key=key_of(*purpose)))


def hashes_of(options: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 of each file that the options of a source of samples name, by key. A pair's is that of its tokens."""
    found: dict[str, str] = {}
    for key, value in options.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{name}": each for name, each in hashes_of(value).items()}
        elif isinstance(value, str):
            # os.path.isfile is False for a text that is too long for a path
            path = next((each for each in (value, f"{value}.bin") if os.path.isfile(each)), None)
            if path is not None:
                found[key] = file_hash(path)
    return found
