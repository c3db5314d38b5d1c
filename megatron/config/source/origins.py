"""Where a value came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Origin:
    """Where a value came from.

    Attributes:
        kind: "file", "argument" (a dotted override), "values" (a dictionary in code), "default", "derived", or
            "start" (known only when the processes start).
        file, line: for kind "file".
        text: the argument as typed, or the formula.
        keys: for kind "derived": the keys that the formula reads.
    """

    kind: Literal["file", "argument", "values", "default", "derived", "start"]
    file: str | None = None
    line: int | None = None
    text: str = ""
    keys: tuple[str, ...] = ()

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
        from ..problems import shown_value

        return (
            f"{self.key} = {shown_value(self.value)} ({self.origin}) over {shown_value(self.lost)} ({self.lost_origin})"
        )

    def to_json(self) -> dict[str, Any]:
        """The loss as a JSON object."""
        return {
            "key": self.key,
            "value": self.value,
            "origin": self.origin.to_json(),
            "lost": self.lost,
            "lost_origin": self.lost_origin.to_json(),
        }
