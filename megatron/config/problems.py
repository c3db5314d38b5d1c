"""Mistakes in a configuration, with all that a user needs: place, key, value, rule, fix. Words and numbers of fixes."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

YAML_WORDS = frozenset("y n yes no on off true false null".split())  # not text to every YAML reader


def counted(number: int, thing: str) -> str:
    """A number with what it counts: 1 rank, 2 ranks."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Lines of a table: the first `left` columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(
            cell.ljust(width) if at < left else cell.rjust(width) for at, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]


ABSENT = object()  # the value of a key that is not there


def shown_value(value: Any) -> str:
    """A value as the user would write it in YAML, cut to one line."""
    if value is ABSENT:
        return "(missing)"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if hasattr(value, "model_dump"):  # a section, without pydantic at import: what differs from its defaults
        value = value.model_dump(exclude_defaults=True)
    if isinstance(value, str):
        text = repr(value)
    elif isinstance(value, dict):
        text = "{" + ", ".join(f"{name}: {shown_value(item)}" for name, item in value.items()) + "}"
    elif isinstance(value, (list, tuple)):
        text = "[" + ", ".join(map(shown_value, value)) + "]"
    else:
        text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


@dataclass(frozen=True)
class Problem:
    """One mistake."""

    key: str  # dotted key ("" for a file as a whole)
    rule: str  # the condition
    fix: str  # the advice
    value: Any = ABSENT  # the key's present value, or ABSENT
    where: str = ""  # where the value came from: "a.yml:12", "argument", "default", ...
    others: tuple[tuple[str, Any, str], ...] = ()  # other keys that the rule read, as (key, value, where)
    fatal: bool = True  # False for a warning

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key, *(key for key, _, _ in self.others))

    def __str__(self) -> str:
        subject = (
            "" if not self.key else self.key if self.value is ABSENT else f"{self.key} = {shown_value(self.value)}"
        )
        where = self.where if len(self.where) <= 160 else f"{self.where[:157]}..."
        lines = [": ".join(part for part in (where, subject) if part)]
        lines += [f"    with: {key} = {shown_value(value)} ({where})" for key, value, where in self.others]
        lines.append(f"    rule: {self.rule}")
        lines.append(f"    fix:  {self.fix}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The problem as a JSON object."""
        return {
            "key": self.key,
            "value": _plain(self.value),
            "where": self.where,
            "rule": self.rule,
            "fix": self.fix,
            "with": {key: _plain(other) for key, other, _ in self.others},
            "fatal": self.fatal,
        }


def _plain(value: Any) -> Any:
    """A value as JSON. Sections become mappings."""
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    dump = getattr(value, "model_dump", None)
    return None if value is ABSENT else dump(mode="json") if dump else value


class UserError(ValueError):
    """A mistake of the user. It is reported without a traceback, and a restart would not help."""


class RuleError(UserError):
    """A rule that something breaks, and the advice.

    Attributes:
        key: the key to fix, where it is known.
    """

    def __init__(self, rule: str, fix: str, key: str = ""):
        self.rule, self.fix, self.key = rule, fix, key
        super().__init__(f"{rule}: {fix}")


class ConfigError(UserError):
    """A configuration that no run can start from. `problems` has every mistake. str() lists them for the user."""

    def __init__(self, problems: Iterable[Problem]):
        self.problems = tuple(problems)
        super().__init__(list_problems(self.problems))

    def __reduce__(self) -> "tuple[type[ConfigError], tuple[tuple[Problem, ...]]]":
        return ConfigError, (self.problems,)


def list_problems(problems: Iterable[Problem]) -> str:
    """All problems, fatal ones first, with a line that counts them."""
    errors = [each for each in problems if each.fatal]
    warnings = [each for each in problems if not each.fatal]
    parts = []
    for name, group in (("problem", errors), ("warning", warnings)):
        if group:
            parts.append(f"{counted(len(group), name)} in the configuration:")
            parts += map(str, group)
    return "\n\n".join(parts)


def uniform_counts(blocks: int, stages: int) -> list[int]:
    """As even as can be: stages in the middle have neither embedding nor head, and take what is left over first."""
    counts = [blocks // stages] * stages
    order = [*range(1, stages - 1), 0, stages - 1] if stages > 1 else [0]
    for stage in order[: blocks % stages]:
        counts[stage] += 1
    return counts


def divisors(number: int) -> list[int]:
    """All divisors, in rising order. Fast for large numbers too."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return small + [number // each for each in reversed(small) if each * each != number]


def near(number: int, choices: list[int]) -> str:
    """The choices just below and above `number`, in words."""
    sides = [
        max((x for x in choices if x < number), default=None),
        min((x for x in choices if x > number), default=None),
    ]
    return " or ".join(str(each) for each in sides if each is not None)


def multiples(number: int, unit: int) -> str:
    """The multiples of `unit` just below and above `number`, in words."""
    below = number // unit * unit
    return " or ".join(str(each) for each in (below, below + unit) if each)
