"""Which modules this process may import for a name in a file of somebody else, such as a checkpoint's configuration.

Importing a module runs its code. The user's own configuration admits the modules that it names, and so do the flag
`--extensions` and the variable DEEPY_EXTENSIONS. A name in a checkpoint or in the folder of a run admits nothing.
"""

import argparse
import os
from collections.abc import Iterable, Sequence
from typing import Any

from .problems import ConfigError, Problem

FLAG, VARIABLE = "--extensions", "DEEPY_EXTENSIONS"
RULE = "importing a module runs its code, so your own configuration must name the modules that a checkpoint needs"
_admitted: set[str] = set()
_strange: set[str] = set()


def admit(modules: Iterable[str]) -> None:
    """Let these modules be imported, and the modules inside them."""
    _admitted.update(modules)


def is_strange(module: str) -> bool:
    """Whether files of others name this module, and the user names neither it nor a package that it is in."""
    if module not in _strange or module.startswith("megatron."):
        return False
    named = {*_admitted, *_words(os.environ.get(VARIABLE, ""))}
    return not any(module == each or module.startswith(f"{each}.") for each in named)


def note_strange(modules: Iterable[str]) -> None:
    """Remember modules that a file of somebody else names: the registry imports none of them before it is admitted."""
    _strange.update(modules)


def refuse_strange(modules: Sequence[str], whose: str) -> None:
    """Refuse modules that a file of somebody else names, unless all are admitted.

    Args:
        whose: the file, for the message.

    Raises:
        ConfigError: with all modules that are not admitted.
    """
    note_strange(modules)
    refused = [each for each in modules if is_strange(each)]
    if refused:
        raise ConfigError([Problem("model.extensions", RULE, how_to_admit(refused), refused, whose)])


def how_to_admit(modules: Sequence[str]) -> str:
    """The fix of a refusal."""
    words = ",".join(modules)
    words = words if words.isprintable() else "MODULES"
    return (
        f"if you trust the code of these modules, give {FLAG} {words}, set {VARIABLE}={words}, or list them in "
        "model.extensions of your own configuration"
    )


def add_flag(parser: argparse.ArgumentParser) -> None:
    """The flag that admits modules, for commands that open a checkpoint or the folder of a run."""
    parser.add_argument(
        FLAG,
        action=_Admit,
        metavar="MODULE[,MODULE]",
        help=f"modules of model.extensions to import, which runs their code (default: {VARIABLE})",
    )


class _Admit(argparse.Action):
    def __call__(self, _parser: Any, _namespace: argparse.Namespace, values: Any, _option: str | None = None) -> None:
        admit(_words(values))


def _words(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]
