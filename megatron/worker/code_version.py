"""A digest of the source code, by which hosts and ranks see that they run the same."""

from __future__ import annotations

import hashlib
from functools import lru_cache

from ..installation import PACKAGE, root

__all__ = ["code_now", "code_version", "root"]


@lru_cache(maxsize=1)
def code_version() -> str:
    """SHA-256 of every Python file of the package and of the scripts next to it, at the time of the first call."""
    return code_now()


def code_now() -> str:
    """SHA-256 of every Python file of the package and of the scripts next to it, with names."""
    digest, top = hashlib.sha256(), root()
    named = {path.name: path for path in top.glob("*.py")}
    named |= {path.relative_to(PACKAGE.parent).as_posix(): path for path in PACKAGE.rglob("*.py")}
    for name, path in sorted(named.items()):
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
