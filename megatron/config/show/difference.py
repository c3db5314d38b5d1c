"""How two configurations differ, by meaning: resolved values are compared, wherever and however they were written."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path as File
from typing import Any

from ..problems import ABSENT, shown_value
from ..resolution import load
from ..schema import Config, dotted
from ..source.resolved_file import read_resolved
from ..source.yaml_source import read_file
from ..tree import leaves, thaw


@dataclass(frozen=True)
class Described:
    """A configuration and where each of its values came from, in words, by dotted key."""

    config: Config
    origins: Mapping[str, str]


@dataclass(frozen=True)
class KeyDifference:
    """A key with unlike values. ABSENT where one side does not have the key."""

    key: str
    values: tuple[Any, Any]
    origins: tuple[str, str]

    def __str__(self) -> str:
        sides = (
            f"{sign} {'(not there)' if value is ABSENT else shown_value(value)}  ({origin})"
            for sign, value, origin in zip("-+", self.values, self.origins)
        )
        return "\n".join([self.key, *(f"  {side}" for side in sides)])

    def to_json(self) -> dict[str, Any]:
        """The difference as a JSON object."""
        first, second = (
            {"value": None if value is ABSENT else value, "there": value is not ABSENT, "origin": origin}
            for value, origin in zip(self.values, self.origins)
        )
        return {"key": self.key, "a": first, "b": second}


def described(path: str | os.PathLike, *, ranks: int | None = None) -> Described:
    """The configuration of a run's directory, of its config.yml, or of a file that a run could start from.

    Args:
        ranks: for a file that is not resolved yet.

    Raises:
        ConfigError: with all problems.
    """
    file = File(path)
    of_a_run = file.is_dir()  # which may be of anybody, and a file is the user's own
    file = file / "config.yml" if of_a_run else file
    source = read_file(os.fspath(file))
    if not source.resolved:
        resolved = load([file], ranks=ranks, check_inputs=False, whose=str(file) if of_a_run else None)
        return Described(resolved.config, {key: str(origin) for key, origin in resolved.origins.items()})
    config, lines = read_resolved(file), file.read_text("utf-8").splitlines()
    origins = {}
    for at, _ in leaves(thaw(config.model_dump())):
        line = source.origin(at).line
        comment = lines[line - 1].rpartition("  # ")[2] if line else ""
        origins[dotted(at)] = comment or "default"
    return Described(config, origins)


def differences(a: Described, b: Described) -> list[KeyDifference]:
    """The keys in which two configurations differ, in order. Patterns of the same layers are equal."""
    values = [{dotted(path): value for path, value in leaves(thaw(each.config.model_dump()))} for each in (a, b)]
    same = list(map(str, a.config.model.blocks)) == list(map(str, b.config.model.blocks))
    return [
        KeyDifference(key, (first, second), (a.origins.get(key, "default"), b.origins.get(key, "default")))
        for key in dict.fromkeys([*values[0], *values[1]])
        if (first := values[0].get(key, ABSENT)) != (second := values[1].get(key, ABSENT))
        and not (key == "model.layers" and same)
    ]
