"""A digest of the source code, by which hosts and ranks see that they run the same."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path


def root() -> Path:
    """The folder that holds the package and the scripts."""
    return Path(__file__).resolve().parents[2]


@lru_cache(maxsize=1)
def code_version() -> str:
    """SHA-256 of every Python file of the package and of the scripts beside it, as it was at the first call."""
    return code_now()


def code_now() -> str:
    """SHA-256 of every Python file of the package and of the scripts beside it, names included."""
    top, digest = root(), hashlib.sha256()
    for path in sorted([*top.glob("*.py"), *(top / "megatron").rglob("*.py")]):
        digest.update(path.relative_to(top).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
