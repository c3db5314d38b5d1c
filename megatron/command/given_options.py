"""Options of a command that does several things: one that the chosen thing does not read is a mistake, not a wish."""

import argparse
import json
import sys
from collections.abc import Callable, Collection

from megatron.config import ConfigError
from megatron.config.file_access import OutputError


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
        parser.error(f"{names} must be omitted: {what} does not read {'it' if len(unread) == 1 else 'them'}")


def status(action: Callable[[], object], as_json: bool) -> int:
    """Exit status of a tool: 2 if `action` is refused. The problems go to standard error, and to standard output as
    JSON with `as_json`."""
    try:
        action()
    except (ConfigError, OutputError) as error:
        print(error, file=sys.stderr)
        if as_json and isinstance(error, ConfigError):
            print(json.dumps({"ok": False, "problems": [each.to_json() for each in error.problems]}, indent=2))
        return 2
    return 0
