"""Options of a command that does several things: one that the chosen thing does not read is a mistake, not a wish."""

from __future__ import annotations

import argparse
from collections.abc import Collection


def refuse_unread(
    parser: argparse.ArgumentParser, options: argparse.Namespace, read: Collection[str], what: str
) -> None:
    """End with status 2 where an option was given that would be ignored.

    Args:
        read: names of what is read, as attributes of `options`. Positional ones too.
        what: is asked of the command, for the message.
    """
    unread = [name for name, value in vars(options).items() if name not in read and value != parser.get_default(name)]
    if unread:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in unread)
        parser.error(f"{names} must be left out: {what} does not read {'it' if len(unread) == 1 else 'them'}")
