"""The extensions of a configuration: modules in `model.extensions`, and installed ones that offer its names."""

import re
from collections.abc import Iterator
from typing import Any

from ..admitted import admit, note_strange, refuse_strange
from ..problems import ConfigError, Problem
from ..registry import (
    HOOK,
    KIND,
    METRIC,
    OBJECTIVE,
    OPTIMIZER,
    PATH,
    RUNNER,
    SCHEDULE,
    SCORER,
    SOURCE,
    RegistryError,
    is_offered,
    offered_by,
    registry_of,
)
from ..schema import Path, schema_of
from ..tree import get, leaves, put
from .layers import ConfigSource, Origin

KEY = ("model", "extensions")
PLACES: tuple[tuple[str, Path], ...] = (  # where a configuration has names of the registry
    (KIND, ("model", "layers")),
    (OPTIMIZER, ("optimizer", "type")),
    (SCHEDULE, ("schedule", "type")),
    (OBJECTIVE, ("objective", "type")),
    (SOURCE, ("data", "synthetic")),
    (RUNNER, ("launch", "runner")),
    (HOOK, ("hooks",)),
    (METRIC, ("logging", "sinks")),
    (SCORER, ("peers", "scorer")),
)
# A kind in a layer pattern: a variant stands after a '@', and x12 is how often.
_NAME = re.compile(r"(?<![@\w])(?!x\s*\d+(?!\w))[A-Za-z_]\w*")


def extensions_of(sources: list[ConfigSource]) -> tuple[str, ...]:
    """The modules to load, in order. Modules that installed packages offer are added to the last source.

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
        keys = tuple(dict.fromkeys(added.values()))
        text = f"what installed packages offer for {' and '.join(keys)}: {', '.join(added)}"
        sources[-1].places[KEY] = Origin("derived", text=text, keys=keys)
    return (*found, *added)


def admit_names(sources: list[ConfigSource]) -> None:
    """Let the modules be imported that the user's own configuration names, by `model.extensions` or an import path."""
    for source in sources:
        admit([*_listed(source), *_folders_of_code(source)])
        admit(module for _, _, _, name in _named([source]) for module, colon, _ in [name.partition(":")] if colon)


def refuse_names(sources: list[ConfigSource], whose: str) -> None:
    """As `admit_names` for a configuration of somebody else: nothing is imported that the user has not admitted.

    Args:
        whose: the file with the configuration, for the message.

    Raises:
        ConfigError: its `model.extensions` lists modules that are not admitted.
    """
    values = [value for source in sources for _, value in leaves(source.values)]
    texts = [each for value in values for each in (value if isinstance(value, list) else [value])]
    note_strange(text.partition(":")[0] for text in texts if isinstance(text, str) and PATH.fullmatch(text))
    listed = [each for source in sources for each in (*_listed(source), *_folders_of_code(source))]
    refuse_strange([each for each in dict.fromkeys(listed) if not is_offered(each)], whose)


def _listed(source: ConfigSource) -> list[str]:
    found = get(source.values, KEY, None)
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []


def _folders_of_code(source: ConfigSource) -> list[str]:
    """Folders of models whose Python code a mapping anywhere in the configuration lets run."""
    found: list[str] = []
    rest: list[Any] = [source.values]
    while rest:
        value = rest.pop()
        if isinstance(value, dict) and value.get("trust_remote_code"):
            folder = str(value.get("config"))
            found.append(f"./{folder}" if folder.startswith("megatron.") else folder)  # a folder is never our module
        if isinstance(value, dict | list):
            rest.extend(value.values() if isinstance(value, dict) else value)
    return found


def _check(modules: list[str], source: ConfigSource) -> None:
    """Check each module by itself, to report all mistakes at once, and then all together, whose names may clash."""
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


def _offered(sources: list[ConfigSource], extensions: tuple[str, ...]) -> dict[str, str]:
    """The modules that installed packages offer for names that nothing listed has, each with the key of the name."""
    added: dict[str, str] = {}
    for role, path, source, name in _named(sources):
        if name in registry_of((*extensions, *added)).names(role):
            continue
        module = offered_by(role, name)
        if module is not None and module not in added:
            key = ".".join(map(str, path))
            try:
                schema_of((*extensions, *added, module))
            except RegistryError as error:
                problem = Problem(key, error.rule, error.fix, name, str(source.origin(path)))
                raise ConfigError([problem]) from None
            added[module] = key
    return added


def _named(sources: list[ConfigSource]) -> Iterator[tuple[str, Path, ConfigSource, str]]:
    """The names in the sources: role, key, source that says it last, name."""
    for role, path in PLACES:
        found = _last(sources, path)
        if found is None:
            continue
        source, value = found
        if role == KIND:
            names = _NAME.findall(value) if isinstance(value, str) else []
        else:  # one name, or a list of names or of {type: name}
            each = value if isinstance(value, list) else [value]
            names = [one.get("type") if isinstance(one, dict) else one for one in each]
        for name in dict.fromkeys(name for name in names if isinstance(name, str)):
            yield role, path, source, name


def _last(sources: list[ConfigSource], path: Path) -> tuple[ConfigSource, Any] | None:
    """The source that says this key last, and what it says."""
    for source in reversed(sources):
        value = get(source.values, path, None)
        if value is not None:
            return source, value
    return None
