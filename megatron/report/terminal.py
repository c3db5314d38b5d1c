"""A status line at the bottom of a terminal, and lines that fit its width.

Rank 0 draws the line. The launcher, which writes to the same terminal, recognises it and keeps it below its own lines.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from typing import TextIO

ERASE = "\r\x1b[K"  # starts every status line, and removes it


def columns_of(file: TextIO) -> int | None:
    """Columns of the terminal behind a file, or the value of COLUMNS. None: any width."""
    if file.isatty():
        try:
            return os.get_terminal_size(file.fileno()).columns or 80
        except (OSError, ValueError):
            return shutil.get_terminal_size().columns
    given = os.environ.get("COLUMNS", "")
    return int(given) if given.isdigit() and int(given) else None


def wrapped(text: str, columns: int | None, indent: str = "    ") -> str:
    """Lines longer than `columns` broken at spaces. Paths and words stay whole."""
    if columns is None:
        return text
    broken = [
        textwrap.wrap(line, max(columns, 20), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        if len(line) > columns
        else [line]
        for line in text.splitlines()
    ]
    return "\n".join(piece for pieces in broken for piece in pieces)


def say(text: str) -> None:
    """Print on standard output. On a terminal no word is broken at its edge."""
    print(wrapped(text, columns_of(sys.stdout)) if sys.stdout.isatty() else text)


class StatusLine:
    """The last drawn status line, which has to be removed before other output.

    Attributes:
        text: without control codes, or empty.
    """

    def __init__(self) -> None:
        self.text = ""

    def removed(self, columns: int | None) -> str:
        """The codes that remove the line from the terminal, also where a narrower window has wrapped it."""
        rows = (len(self.text) - 1) // columns if self.text and columns else 0
        return ERASE + (f"\x1b[{rows}A\x1b[J" if rows else "") if self.text else ""

    def drawn(self) -> str:
        return ERASE + self.text if self.text else ""

    def above(self, text: str, columns: int | None) -> str:
        """Codes and text that put text above the status line. Text without an end of line takes its place."""
        removed = self.removed(columns)
        self.text = self.text if text.endswith("\n") else ""
        return removed + text + self.drawn()
