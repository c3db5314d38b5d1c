"""One key in full: what it is, what it means, and where its value came from."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

from ..catalog import Key, Path, catalog, describe_type, dotted, lookup, parse_path, pattern_of
from ..frozen import thaw
from ..problems import ABSENT, ConfigError, Problem, shown_value
from ..resolution import Resolved
from ..schema import using_extensions
from ..source.origins import Origin, Overridden
from ..source.structure import nearest, nearest_key
from ..tree import get


@dataclass(frozen=True)
class Explanation:
    """A key, and its value in a run if there is one."""

    name: str
    key: Key
    value: Any = ABSENT
    origin: Origin | None = None
    lost: tuple[Overridden, ...] = ()

    @property
    def type(self) -> str:
        return describe_type(self.key.annotation, self.key.limits) + (" or null" if self.key.nullable else "")

    @property
    def formula(self) -> str | None:
        """How it is derived, if it is."""
        return self.key.derived

    def text(self) -> str:
        lines = [self.name if self.value is ABSENT else f"{self.name} = {shown_value(self.value)}"]
        if self.origin:
            lines.append(f"    from:    {self.origin}")
        lines += [f"    won:     over {shown_value(each.lost)} ({each.lost_origin})" for each in self.lost]
        lines += textwrap.wrap(self.key.sentence, 100, initial_indent="    meaning: ", subsequent_indent=" " * 13)
        lines.append(f"    type:    {self.type}" + (f", in {self.key.unit}" if self.key.unit else ""))
        if self.key.required:
            lines.append("    default: none, it is required")
        elif self.formula:
            lines.append(f"    default: {self.formula}")
        else:
            lines.append(f"    default: {default_text(self.key)}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        known = self.value is not ABSENT
        return {
            "key": self.name,
            "value": self.value if known else None,
            "origin": str(self.origin) if self.origin else None,
            "source": self.origin.to_json() if self.origin else None,
            "meaning": self.key.sentence,
            "type": self.type,
            "unit": self.key.unit,
            "default": None if self.key.required else plain_default(self.key),
            "required": self.key.required,
            "derived": self.formula,
            "overridden": [each.to_json() for each in self.lost],
        }


def plain_default(key: Key) -> Any:
    """The default as plain lists and dictionaries, without what is default inside it."""
    if hasattr(key.default, "model_dump"):
        return thaw(key.default.model_dump(exclude_defaults=True))
    if isinstance(key.default, dict):
        return {
            name: thaw(each.model_dump(exclude_defaults=True)) if hasattr(each, "model_dump") else each
            for name, each in key.default.items()
        }
    return thaw(key.default)


def default_text(key: Key) -> str:
    """The default as YAML would say it."""
    return shown_value(plain_default(key))


def explain(name: str, resolved: Resolved | None) -> list[Explanation]:
    """A key, or every key of a section.

    Args:
        name: dotted key. Names and indices of the run's own, such as data.train.0.weight, are allowed.
        resolved: the run. None explains only the schema.

    Raises:
        ConfigError: the schema has no such key.
    """
    with using_extensions(tuple(resolved.config.model.extensions) if resolved else ()):
        return _explain(name, resolved)


def _explain(name: str, resolved: Resolved | None) -> list[Explanation]:
    path = parse_path(name)
    key = lookup(path)
    if key is None or key.section:
        above = pattern_of(path)
        inner = [each for each in catalog().values() if each.path[:-1] == above and not each.section]
        if not inner:
            beside = len(path) == 1 or lookup(path[:-1])
            fix = nearest_key(path) if beside else nearest(name, [each.name for each in catalog().values()])
            fix = fix or "name a section to see its keys. docs/configuration.md lists all"
            raise ConfigError([Problem(name, "the schema has no such key", fix)])
        return [_entry((*path, each.path[-1]), each, resolved) for each in inner]
    return [_entry(path, key, resolved)]


def _entry(path: Path, key: Key, resolved: Resolved | None) -> Explanation:
    name = dotted(path)
    if resolved is None:
        return Explanation(name, key)
    value = get(thaw(resolved.config.model_dump()), path)
    inside = [each for each in resolved.origins if each == name or each.startswith(name + ".")]
    origin = resolved.origins[inside[0]] if inside else None
    lost = tuple(each for each in resolved.overridden if each.key == name)
    return Explanation(name, key, value, origin, lost)
