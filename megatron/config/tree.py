"""Nested dictionaries and lists: read and written by path, and frozen as in a resolved configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from .problems import ABSENT

Path = tuple[str | int, ...]
SCALARS = frozenset((bool, int, float, str, type(None)))  # types of most values
ANY = "*"  # stands for a name in a mapping or an index in a list


def get(tree: Any, path: Path, default: Any = ABSENT) -> Any:
    """The value at `path`, or `default` where something on the way is missing."""
    for part in path:
        if isinstance(tree, dict) and part in tree:
            tree = tree[part]
        elif isinstance(tree, dict) and str(part) in tree:  # a name of digits
            tree = tree[str(part)]
        elif isinstance(tree, list) and isinstance(part, int) and 0 <= part < len(tree):
            tree = tree[part]
        else:
            return default
    return tree


def put(tree: Any, path: Path, value: Any) -> None:
    """Set the value at `path`, making the mappings on the way."""
    for part in path[:-1]:
        tree = tree.setdefault(part, {}) if isinstance(tree, dict) else tree[part]
    tree[path[-1]] = value


def drop(tree: Any, path: Path) -> None:
    """Remove the value at `path`, if there is one."""
    parent = get(tree, path[:-1], None)
    if isinstance(parent, dict):
        parent.pop(path[-1], None)
    elif isinstance(parent, list) and isinstance(path[-1], int) and path[-1] < len(parent):
        del parent[path[-1]]


def leaves(tree: Any, above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """All (path, value) pairs where the value is no mapping and no list of mappings. Empty ones count."""
    waiting = [(above, tree)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict) and value:
            waiting += [((*path, name), item) for name, item in reversed(value.items())]
        elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
            waiting += reversed([((*path, index), item) for index, item in enumerate(value)])
        else:
            yield path, value


def expand(tree: Any, pattern: tuple[str, ...]) -> list[Path]:
    """The concrete paths in `tree` that a pattern with `ANY` stands for (the last part need not exist)."""
    paths: list[Path] = [()]
    for part in pattern:
        if part != ANY:
            paths = [(*path, part) for path in paths]
            continue
        found: list[Path] = []
        for path in paths:
            members = get(tree, path, None)
            names = members if isinstance(members, dict) else range(len(members)) if isinstance(members, list) else ()
            found += [(*path, name) for name in names]
        paths = found
    return paths


def _refuse(self: object, *_: Any, **__: Any) -> NoReturn:
    raise TypeError("the configuration is frozen after resolution: change the YAML file or give an override instead")


class FrozenList(list):
    """A list without its mutating methods. It compares, serialises and pickles like a list."""

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = extend = insert = pop = remove = clear = sort = reverse = _refuse

    def __reduce__(self) -> tuple[type[FrozenList], tuple[list]]:
        return FrozenList, (list(self),)

    def __deepcopy__(self, memo: dict) -> FrozenList:
        return self


class FrozenDict(dict):
    """A dictionary without its mutating methods. It compares, serialises and pickles like a dict."""

    __setitem__ = __delitem__ = __ior__ = _refuse
    pop = popitem = clear = update = setdefault = _refuse

    def __reduce__(self) -> tuple[type[FrozenDict], tuple[dict]]:
        return FrozenDict, (dict(self),)

    def __deepcopy__(self, memo: dict) -> FrozenDict:
        return self


def freeze(value: Any) -> Any:
    """`value` with every list and dictionary inside it replaced by its frozen form."""
    if isinstance(value, dict):
        return FrozenDict({name: freeze(item) for name, item in value.items()})
    if isinstance(value, tuple):
        return tuple(freeze(item) for item in value)
    if isinstance(value, list):
        return FrozenList(freeze(item) for item in value)
    return value


def thaw(value: Any) -> Any:
    """A plain copy of `value` that may be changed: ordinary dictionaries and lists, tuples as lists."""
    if isinstance(value, dict):
        return {name: item if type(item) in SCALARS else thaw(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [thaw(item) for item in value]
    return value
