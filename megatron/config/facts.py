"""What a rule looks at: the configuration, the ranks, and where each value came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .catalog import Path, dotted, parse_path
from .origins import Origin
from .pattern import Block, PatternError, parse
from .problems import Problem
from .schema import Config


@dataclass(frozen=True)
class Facts:
    """A derived configuration and what is known beside it.

    Attributes:
        config: every derivable key filled in.
        ranks: processes of the whole run; None if unknown (rules about the layout of data then say nothing).
        origin: where the value at a path came from.
    """

    config: Config
    ranks: int | None
    origin: Callable[[Path], Origin] = field(repr=False)

    @property
    def inner(self) -> int:
        """Ranks of one data parallel replica."""
        parallel = self.config.parallel
        return parallel.tensor * parallel.pipeline * parallel.context

    @property
    def data_ranks(self) -> int | None:
        """The data parallel size, if it is known."""
        return self.ranks // self.inner if self.ranks and self.ranks % self.inner == 0 else None

    @cached_property
    def blocks(self) -> list[Block]:
        """The blocks of `model.layers`; none if it cannot be read."""
        try:
            return parse(self.config.model.layers)
        except PatternError:
            return []

    def uses(self, kind: str) -> bool:
        """Whether the pattern has a layer of this kind."""
        return any(each.name == kind for block in self.blocks for each in block.kinds)

    def value(self, key: str) -> Any:
        """The value of a dotted key; parts of digits are indices."""
        return self._at(parse_path(key))

    def _at(self, path: Path) -> Any:
        value: Any = self.config
        for part in path:
            value = value[part] if isinstance(value, (dict, list)) else getattr(value, str(part))
        return value

    def given(self, key: str) -> bool:
        """Whether the user gave this key."""
        return self.origin(parse_path(key)).given

    def problem(self, key: str, *others: str, rule: str, fix: str, fatal: bool = True) -> Problem:
        """A problem with `key`, in view of the `others`; values and places are filled in here."""
        return self.problem_at(parse_path(key), *others, rule=rule, fix=fix, fatal=fatal)

    def problem_at(self, path: Path, *others: str, rule: str, fix: str, fatal: bool = True) -> Problem:
        """`problem` for a key whose path has names that a dotted key would split."""
        origin = self.origin(path)
        if origin.kind == "derived":  # lead the user to what they wrote
            others = tuple(dict.fromkeys((*others, *(key for key in origin.keys if "*" not in key))))
        seen = tuple((other, self.value(other), str(self.origin(parse_path(other)))) for other in others)
        written = (self.origin(parse_path(key)) for key in origin.keys if "*" not in key)
        where = next((place for place in written if place.given), origin)
        return Problem(dotted(path), rule, fix, self._at(path), str(where), seen, fatal)

    def warning(self, key: str, *others: str, rule: str, fix: str) -> Problem:
        """A problem that does not stop the run."""
        return self.problem(key, *others, rule=rule, fix=fix, fatal=False)
