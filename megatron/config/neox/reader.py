"""Reading flat keys with their types, writing native ones with their origins, and the result of a translation."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ..problems import ABSENT, Problem
from ..source.layers import Origin


@dataclass
class Translation:
    """The native configuration that GPT-NeoX files describe.

    Attributes:
        values: native nested values. GPT-NeoX's defaults that bear on the numbers are written out.
        origins: native dotted key -> where it came from, with the GPT-NeoX keys that it was made from, or with the one
            whose default it is. Lists and raw dictionaries are one key.
        notes: for the user. One of them lists all keys without effect.
        problems: keys that cannot be translated.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


T = TypeVar("T")
DEFAULT_OF = "GPT-NeoX's"  # before the key, in the origin of a value that no file gives
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True)
class FlatEntry:
    """One flat key as a file gives it. `spelling` has the file's dashes."""

    value: Any
    origin: Origin
    spelling: str


def as_number(value: Any) -> float | int | None:
    """`value` as a finite number, or None. YAML 1.1 reads 1e-8 as text, which is a number all the same."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return value if math.isfinite(value) else None
    if isinstance(value, str) and NUMBER.fullmatch(value.strip()):
        return float(value)
    return None


class Flat:
    """Merged flat keys, under their names with underscores. A value of null counts as not given, as in GPT-NeoX."""

    def __init__(self, entries: Mapping[str, FlatEntry], defaults: Mapping[str, Any], problems: list[Problem]):
        self.entries, self.defaults, self.problems = entries, defaults, problems

    def given(self, name: str) -> bool:
        """Whether a file gives a value other than null. A part of a dictionary has a dotted name."""
        top, *parts = name.split(".")
        value = self.entries[top].value if top in self.entries else None
        for part in parts:
            value = value.get(part) if isinstance(value, dict) else None
        return value is not None

    def raw(self, name: str) -> Any:
        """The value, or GPT-NeoX's default, unchecked."""
        return self.entries[name].value if self.given(name) else self.defaults[name]

    def problem(self, name: str, rule: str, fix: str, value: Any = None) -> None:
        """Report a key. `value` replaces the whole value in the message, for a part of a dictionary."""
        entry = self.entries.get(name)
        value = entry.value if value is None and entry else value
        spelling, where = (entry.spelling, str(entry.origin)) if entry else (name, "")
        found = Problem(spelling, rule, fix, ABSENT if value is None else value, where)
        if found not in self.problems:  # several topics read some keys
            self.problems.append(found)

    def require(self, name: str, meaning: str) -> None:
        """Report `name` if no file gives it."""
        if not self.given(name):
            self.problem(name, f"GPT-NeoX files must give {name}: {meaning}", f"add {name}")

    def number(self, name: str) -> float | None:
        return self._typed(name, as_number, "a number", "write a number, as in 0.1 or 1.0e-8")

    def integer(self, name: str) -> int | None:
        """A whole number, or None. 1.0e6 is one."""
        return self._typed(name, _whole, "a whole number", "write a whole number without quotes")

    def count(self, name: str) -> int | None:
        """A whole number above 0, or None."""
        return self._typed(
            name,
            lambda value: whole if (whole := _whole(value)) and whole > 0 else None,
            "a whole number above 0",
            "write a whole number above 0 without quotes",
        )

    def defaulted_number(self, name: str) -> float:
        """The number of a key whose default is one."""
        return float(_present(name, self.number(name)))

    def defaulted_integer(self, name: str) -> int:
        """The whole number of a key whose default is one."""
        return _present(name, self.integer(name))

    def defaulted_count(self, name: str) -> int:
        """The whole number above 0 of a key whose default is one."""
        return _present(name, self.count(name))

    def boolean(self, name: str) -> bool | None:
        return self._instance(name, bool, "true or false", "write true or false without quotes")

    def text(self, name: str) -> str | None:
        return self._instance(name, str, "text", "write it in quotes")

    def items(self, name: str) -> list | None:
        return self._instance(name, list, "a list", "write [a, b]")

    def mapping(self, name: str) -> dict | None:
        return self._instance(name, dict, "a mapping", "write {key: value}")

    def _instance(self, name: str, of: type, kind: str, fix: str) -> Any:
        return self._typed(name, lambda value: value if isinstance(value, of) else None, kind, fix)

    def choice(self, name: str, choices: Mapping[str, Any], others: Mapping[str, str] | None = None) -> Any:
        """The entry of `choices` for the value, in any letter case. `others` has the fix for known, refused values.

        Returns None, with a problem, for a value that is in neither or is refused."""
        value = self.text(name)
        if value is None or value.lower() in choices:
            return None if value is None else choices[value.lower()]
        refused = (others or {}).get(value.lower())
        allowed = ", ".join(choices)
        rule = f"this value of {name} is not available here" if refused else f"{name} must be one of {allowed}"
        self.problem(name, rule, refused or f"take one of {allowed}")
        return None

    def _typed(self, name: str, convert: Callable[[Any], Any], kind: str, fix: str) -> Any:
        if not self.given(name):
            return self.defaults[name]
        value = self.entries[name].value
        converted = convert(value)
        if converted is None:
            self.problem(name, f"{name} must be {kind}", fix)
            return self.defaults[name]
        return converted


def _present(name: str, value: T | None) -> T:
    if value is None:
        raise ValueError(f"GPT-NeoX has no default for {name}")
    return value


def _whole(value: Any) -> int | None:
    number = as_number(value)
    return int(number) if number is not None and number == int(number) else None


class Native:
    """The native side of a translation: values with origins, and what became of each flat key."""

    def __init__(self, flat: Flat, result: Translation):
        self.flat, self.result = flat, result
        self.used: set[str] = set()
        self.idle: dict[str, str] = {}  # flat key -> why it has no effect

    def put(self, key: str, value: Any, *names: str) -> None:
        """Set the native dotted `key`. `names` are the flat keys that it was made from, the main one first.

        A part of a dictionary has a dotted name, as in optimizer.params.lr."""
        *sections, last = key.split(".")
        tree = self.result.values
        for section in sections:
            tree = tree.setdefault(section, {})
        tree[last] = value
        self.result.origins[key] = self.origin(*names)
        self.used.update(name.split(".")[0] for name in names)

    def origin(self, *names: str) -> Origin:
        """The place of the first of `names` that a file gives, or GPT-NeoX's default."""
        given = [name for name in names if self.flat.given(name)]
        if not given:
            return Origin("default", text=f"{DEFAULT_OF} {names[0]}")
        entries = [self.flat.entries[name.split(".")[0]] for name in given]
        if entries[0].origin.kind != "file":
            return entries[0].origin
        spellings = [".".join([entry.spelling, *name.split(".")[1:]]) for name, entry in zip(given, entries)]
        return replace(entries[0].origin, text=", ".join(spellings))

    def unused(self, reason: str, *names: str) -> None:
        """Record that flat keys have no effect, if they are given."""
        self.idle.update({name: reason for name in names if self.flat.given(name)})

    def note(self, text: str) -> None:
        self.result.notes.append(text)
