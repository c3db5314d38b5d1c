"""The words after a script's name: configuration files, overrides, and what is the script's own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .problems import UserError

FILES = (".yml", ".yaml", ".json")
_PLACE = re.compile(r"--local[-_]rank=\d+")  # DeepSpeed's launcher puts it first; the environment says it too
_OVERRIDE = re.compile(r"[A-Za-z_][\w-]*(\.[\w@*-]+)*=", re.ASCII)


class ArgumentError(UserError):
    """A word that nobody understands."""


@dataclass(frozen=True)
class Arguments:
    """`a.yml b.yml key.path=value ... [--option ...]`, taken apart.

    Attributes:
        files: configuration files, in the order in which they are merged.
        overrides: `key.path=value` words.
        own: the rest: everything from the first word that begins with a dash; a bare `--` is only the border.
    """

    files: tuple[str, ...]
    overrides: tuple[str, ...]
    own: tuple[str, ...]


def split(words: Sequence[str]) -> Arguments:
    """Take a script's arguments apart.

    Raises:
        ArgumentError: a word before the first option that is neither a configuration file nor an override.
    """
    words = [word for index, word in enumerate(words) if index or not _PLACE.fullmatch(word)]
    end = next((index for index, word in enumerate(words) if word.startswith("-")), len(words))
    files: list[str] = []
    overrides: list[str] = []
    for word in words[:end]:
        if _OVERRIDE.match(word):
            overrides.append(word)
        elif word.endswith(FILES):
            files.append(word)
        else:
            raise ArgumentError(
                f"{word!r} is neither a configuration file ({', '.join(FILES)}) nor an override (key.path=value)"
            )
    own = words[end:]
    return Arguments(tuple(files), tuple(overrides), tuple(own[1:] if own[:1] == ["--"] else own))
