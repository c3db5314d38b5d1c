"""Where a value came from, one source of values with the place of each, and how sources are merged."""

from dataclasses import dataclass, field
from typing import Any, Literal

from ..problems import Problem, shown_value
from ..schema import Path, dotted
from ..tree import drop, get, leaves, put, thaw


@dataclass(frozen=True)
class Origin:
    """Where a value came from."""

    # "file", "argument" (a dotted override), "values" (a dictionary in code), "default", "derived", or "start" (known
    # only when the processes start)
    kind: Literal["file", "argument", "values", "default", "derived", "start"]
    file: str | None = None  # file, line: for kind "file"
    line: int | None = None
    text: str = ""  # the argument as typed, or the formula
    keys: tuple[str, ...] = ()  # for kind "derived": the keys that the formula reads

    @property
    def given(self) -> bool:
        """Whether the user said so."""
        return self.kind in ("file", "argument", "values")

    def __str__(self) -> str:
        if self.kind == "file":
            return f"{self.file}:{self.line}" + (f" ({self.text})" if self.text else "")
        if self.kind == "argument":
            return f"argument {self.text}"
        if self.kind == "derived":
            return f"derived: {self.text}"
        if self.kind == "start":
            return f"at start: {self.text}"
        return "given" if self.kind == "values" else f"default ({self.text})" if self.text else "default"

    def to_json(self) -> dict[str, Any]:
        """The origin as a JSON object."""
        known = {"kind": self.kind, "file": self.file, "line": self.line, "text": self.text, "keys": list(self.keys)}
        return {name: value for name, value in known.items() if value not in (None, "", [])}


DEFAULT = Origin("default")
VALUES = Origin("values")


@dataclass(frozen=True)
class Overridden:
    """A value that lost to a later one."""

    key: str
    value: Any
    origin: Origin
    lost: Any
    lost_origin: Origin

    def __str__(self) -> str:
        return (
            f"{self.key} = {shown_value(self.value)} ({self.origin}) over {shown_value(self.lost)} ({self.lost_origin})"
        )

    def to_json(self) -> dict[str, Any]:
        """The loss as a JSON object."""
        return {**vars(self), "origin": self.origin.to_json(), "lost_origin": self.lost_origin.to_json()}


@dataclass
class ConfigSource:
    """Nested values and the origin of each key."""

    values: dict[str, Any]  # nested dictionaries, lists and scalars.
    # The origin of each path that has one. Other paths have their parent's.
    places: dict[Path, Origin] = field(default_factory=dict)
    fallback: Origin = VALUES  # the origin where there is none
    problems: list[Problem] = field(default_factory=list)  # of its text
    unread: bool = False  # whether it could not be read at all
    resolved: bool = False  # whether it is a resolved file, which has all keys

    def origin(self, path: Path) -> Origin:
        """Where the value at `path` came from."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return self.fallback

    def places_at(self, path: Path) -> dict[Path, Origin]:
        """The places of `path` and of what is below it, by what follows `path`.

        Only a mapping or a list has something below it: for the many scalars nothing is searched."""
        if not isinstance(get(self.values, path, None), (dict, list)):
            return {(): self.places[path]} if path in self.places else {}
        return {known[len(path) :]: place for known, place in self.places.items() if known[: len(path)] == path}


def merge(sources: list[ConfigSource]) -> tuple[ConfigSource, list[Overridden]]:
    """Merge sources left to right: mappings key by key, everything else replaced. null resets an earlier value. In a
    variant, whose options replace the kind's, it is a value.

    Returns:
        The merged source, and each value that lost to a different one.
    """
    result, lost = ConfigSource({}), []
    for source in sources:
        result.problems += source.problems
        result.unread |= source.unread
        for path in dict.fromkeys(_whole(path) for path, _ in leaves(source.values)):
            if path:
                lost += _set(result, path, source)
    return result, lost


def _in_a_variant(path: Path) -> bool:
    """Whether a path is an option of a variant. There null is a value, which replaces that of the kind."""
    return path[:2] == ("model", "variants") and len(path) > 3


def _whole(path: Path) -> Path:
    """The path up to the first list on the way: lists are replaced whole."""
    for length, part in enumerate(path):
        if isinstance(part, int):
            return path[:length]
    return path


def _set(result: ConfigSource, path: Path, source: ConfigSource) -> list[Overridden]:
    """Take one value (a scalar, a whole list, or an empty mapping) of `source` over into `result`."""
    value, origin = get(source.values, path), source.origin(path)
    lost = []
    for length in range(1, len(path)):  # a scalar that stands where a mapping comes
        old = get(result.values, path[:length], {})
        if not isinstance(old, dict):
            if old is not None:
                lost.append(Overridden(dotted(path[:length]), "a mapping", origin, old, result.origin(path[:length])))
            _forget(result, path[:length])
            put(result.values, path[:length], {})
    old = get(result.values, path, None)
    if isinstance(old, dict) and value == {}:
        return lost  # an empty section adds nothing
    if old is not None and old != value:
        lost.append(Overridden(dotted(path), thaw(value), origin, old, result.origin(path)))
    _forget(result, path)
    if value is None and not _in_a_variant(path):
        drop(result.values, path)
        return lost
    put(result.values, path, thaw(value))
    above = (path[:length] for length in range(1, len(path)))
    result.places.update({known: source.places[known] for known in above if known in source.places})
    result.places.update({(*path, *rest): place for rest, place in source.places_at(path).items()})
    result.places[path] = origin
    return lost


def _forget(result: ConfigSource, path: Path) -> None:
    for rest in result.places_at(path):
        del result.places[(*path, *rest)]
