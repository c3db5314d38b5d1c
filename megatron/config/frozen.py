"""Lists and dictionaries that nothing can change, so that a resolved configuration is frozen all the way down."""

from __future__ import annotations

from typing import Any, NoReturn


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
        return {name: thaw(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [thaw(item) for item in value]
    return value
