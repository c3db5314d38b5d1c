"""Which extensions a configuration needs: those that `model.extensions` lists, and those that offer a kind it uses."""

from __future__ import annotations

import re
from typing import Any

from .kind import kinds_of
from .layers import Source
from .origins import Origin
from .problems import ConfigError, Problem
from .registry import KIND, RegistryError, offered
from .schema import schema_of
from .tree import get, put

KEY = ("model", "extensions")
_NAME = re.compile(r"(?<![@\w])[A-Za-z_]\w*")  # of a kind in a layer pattern; a variant stands after a '@'


def extensions_of(sources: list[Source]) -> tuple[str, ...]:
    """The modules to load, in order; what an installed package offers is added to the last source.

    Raises:
        ConfigError: with each that cannot be used.
    """
    listed = _last(sources, KEY)
    if listed is None or not isinstance(listed[1], list) or not all(isinstance(each, str) for each in listed[1]):
        found = []  # of the wrong type, which is reported with all other types
    else:
        found = list(dict.fromkeys(listed[1]))
        _check(found, listed[0])
    added = _offered(sources, tuple(found))
    if added:
        put(sources[-1].values, KEY, [*found, *added])
        text = f"what installed packages offer for model.layers: {', '.join(added)}"
        sources[-1].places[KEY] = Origin("derived", text=text, keys=("model.layers",))
    return (*found, *added)


def _check(modules: list[str], source: Source) -> None:
    """Each by itself first, so that all that is wrong is said at once; then all together, whose names may clash."""
    problems = []
    for index, module in enumerate(modules):
        try:
            schema_of((module,))
        except RegistryError as error:
            place = str(source.origin((*KEY, index)))
            problems.append(Problem(f"model.extensions.{index}", error.rule, error.fix, module, place))
    if not problems:
        try:
            schema_of(tuple(modules))
        except RegistryError as error:
            problems.append(Problem("model.extensions", error.rule, error.fix, modules, str(source.origin(KEY))))
    if problems:
        raise ConfigError(problems)


def _offered(sources: list[Source], extensions: tuple[str, ...]) -> list[str]:
    layers = _last(sources, ("model", "layers"))
    if layers is None or not isinstance(layers[1], str):
        return []
    known, added = kinds_of(extensions), []
    for name in dict.fromkeys(_NAME.findall(layers[1])):
        module = None if name in known else offered(KIND, name)
        if module is not None and module not in added:
            added.append(module)
            try:
                schema_of((*extensions, *added))
            except RegistryError as error:
                place = str(layers[0].origin(("model", "layers")))
                raise ConfigError([Problem("model.layers", error.rule, error.fix, layers[1], place)]) from None
    return added


def _last(sources: list[Source], path: tuple[str, ...]) -> tuple[Source, Any] | None:
    """The source that says this key last, and what it says."""
    for source in reversed(sources):
        value = get(source.values, path, None)
        if value is not None:
            return source, value
    return None
