"""Rules of one expression, as rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..catalog import Path
from ..problems import Problem
from ..rule_context import RuleContext
from ..schema import Config

Text = str | Callable[[Config], str]  # a function where it depends on values


@dataclass(frozen=True)
class Check:
    """A rule whose condition and texts need the configuration only.

    Attributes:
        keys: the key with the problem, then the keys that it must fit, separated by spaces.
        broken: whether a configuration breaks the rule.
        rule, fix: of the problem.
        fatal: False for a warning.
    """

    keys: Text
    broken: Callable[[Config], Any]
    rule: Text
    fix: Text
    fatal: bool = True

    def __call__(self, context: RuleContext) -> Iterator[Problem]:
        config = context.config
        if self.broken(config):
            texts = (self.keys, self.rule, self.fix)
            keys, rule, fix = (text if isinstance(text, str) else text(config) for text in texts)
            yield context.problem(keys, rule=rule, fix=fix, fatal=self.fatal)


def check_order(context: RuleContext, path: Path, key: str, entries: Sequence[object], what: str) -> Iterator[Problem]:
    """Problems of entries of the list at `path` whose `key`, a step, is not above that of the entry before."""
    steps = [getattr(entry, key) for entry in entries]
    for index, (before, after) in enumerate(zip(steps, steps[1:]), 1):
        if after <= before:
            rule = f"must be above the {what} before, {before}"
            yield context.problem_at((*path, index, key), rule=rule, fix=f"use more than {before}")
