"""Words for people, and words that YAML readers disagree about."""

from __future__ import annotations

from collections.abc import Sequence

YAML_WORDS = frozenset("y n yes no on off true false null".split())  # not text to every YAML reader


def counted(number: int, thing: str) -> str:
    """A number with what it counts: 1 rank, 2 ranks."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Lines of a table: the first `left` columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(
            cell.ljust(width) if at < left else cell.rjust(width) for at, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
