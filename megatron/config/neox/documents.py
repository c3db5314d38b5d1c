"""Inputs and results of a translation of GPT-NeoX files, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True)
class FlatDocument:
    """One file of flat GPT-NeoX keys.

    Attributes:
        path: the file, as messages name it.
        values: its keys as written, with dashes or underscores.
        lines: the line of each key that is known.
        override: whether its values replace values of other documents, as arguments do.
    """

    path: str
    values: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict)
    override: bool = False


class FlatOrigin(NamedTuple):
    """Where a native value came from: the file, the line and the GPT-NeoX key or keys that it was made from.

    `path` is None where no file says it and GPT-NeoX's own default for `key` was taken.
    """

    path: str | None
    line: int | None
    key: str


@dataclass(frozen=True)
class FlatProblem:
    """One thing that cannot be translated. `value` is None and `path` "" where a required key is missing."""

    path: str
    line: int | None
    key: str
    value: Any
    rule: str
    fix: str


@dataclass
class Translation:
    """The native configuration that GPT-NeoX files describe.

    Attributes:
        values: native nested values. GPT-NeoX's defaults that bear on the numbers are written out.
        origins: native dotted key -> where it came from. Lists and raw dictionaries are one key.
        notes: for the user. One of them lists all keys without effect.
        problems: keys that cannot be translated.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, FlatOrigin] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[FlatProblem] = field(default_factory=list)
