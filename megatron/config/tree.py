"""Reading and writing nested dictionaries and lists by path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .problems import ABSENT

Path = tuple[str | int, ...]
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
    if isinstance(tree, dict) and tree:
        for name, item in tree.items():
            yield from leaves(item, (*above, name))
    elif isinstance(tree, list) and any(isinstance(item, (dict, list)) for item in tree):
        for index, item in enumerate(tree):
            yield from leaves(item, (*above, index))
    else:
        yield above, tree


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
