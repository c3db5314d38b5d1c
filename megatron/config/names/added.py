"""Making what a user's packages add to a run."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from ..problems import UserError
from ..registry import RegistryError, registry_of
from ..schema import Config
from ..section import Addition


def resolve_import(config: Config, key: str, role: str, name: str) -> Any:
    """The object behind a name, or an import path, in this run.

    Raises:
        UserError: it cannot be imported. The message names the key.
    """
    try:
        return registry_of(tuple(config.model.extensions)).load(role, name)
    except RegistryError as error:
        raise UserError(f"{key} = {name!r}: {error.rule}\n    fix: {error.fix}") from error


def build_added(config: Config, key: str, role: str, entries: Sequence[Any], *args: Any, kind: type) -> list[Any]:
    """Each entry's class, made with `args` and with its options as keyword arguments.

    Args:
        key: where the entries stand in the configuration.
        kind: the class of each instance. Methods of a protocol must be there.

    Raises:
        UserError: one cannot be imported, does not take its options, or is something else.
    """
    made = []
    for index, entry in enumerate(entries):
        where = f"{key}.{index}.type"
        what = resolve_import(config, where, role, entry.type)
        try:
            inspect.signature(what).bind(*args, **_options(entry))
        except TypeError as error:
            raise UserError(f"{key}.{index}.options do not suit {entry.type}: {error}") from error
        thing = what(*args, **_options(entry))
        if not isinstance(thing, kind):
            raise UserError(f"{where} = {entry.type!r} must make a {kind.__module__}.{kind.__name__}, not {thing!r}")
        made.append(thing)
    return made


def _options(entry: Addition) -> dict[str, Any]:
    return {str(name): value for name, value in entry.options.items()}
