"""Words for people."""

from __future__ import annotations


def counted(number: int, thing: str) -> str:
    """A number with what it counts: 1 rank, 2 ranks."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
