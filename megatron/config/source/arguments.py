"""The words after a script's name: configuration files, overrides, and what is the script's own."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ...installation import configuration_file, near_names
from ..problems import UserError

FILES = (".yml", ".yaml", ".json")
_PLACE = re.compile(r"--local[-_]rank=\d+")  # DeepSpeed's launcher puts it first. The environment has it too
_OVERRIDE = re.compile(r"[A-Za-z_][\w-]*(\.[\w@*-]+)*=", re.ASCII)


class ArgumentError(UserError):
    """A word that is no file, name or override."""


@dataclass(frozen=True)
class Arguments:
    """`a.yml b.yml key.path=value ... [--option ...]`, taken apart."""

    files: tuple[str, ...]  # configuration files, in the order in which they are merged
    overrides: tuple[str, ...]  # `key.path=value` words
    # The rest: everything from the first word that begins with a dash. A bare `--` is only the border.
    own: tuple[str, ...]


def _is_override(word: str, before: str) -> bool:
    """Whether a word among a script's options is an override: it begins with a section, and no option may want it."""
    from ..schema import Config  # not needed where overrides stand first

    section, dot, rest = word.partition(".")
    wanted = before.startswith("-") and "=" not in before
    return bool(dot and _OVERRIDE.match(rest)) and section in Config.model_fields and not wanted


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
        elif (found := configuration_file(word)) is not None or word.endswith(FILES):
            files.append(found or word)
        else:
            near = near_names(word)
            meant = f": did you mean {' or '.join(near)}?" if near else ". `deepy list` shows the ready ones"
            raise ArgumentError(
                f"{word!r} is neither a configuration file ({', '.join(FILES)}), nor the name of a ready one "
                f"(pythia/70m), nor an override (key.path=value){meant}"
            )
    own = words[end:]
    border = own.index("--") if "--" in own else len(own)
    behind = [index for index in range(1, border) if _is_override(own[index], own[index - 1])]
    overrides += [own[index] for index in behind]
    own = [word for index, word in enumerate(own) if index not in behind]
    return Arguments(tuple(files), tuple(overrides), tuple(own[1:] if own[:1] == ["--"] else own))
