"""A rule of features whose numbers are part of the logged lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..problems import Problem
    from ..rule_context import RuleContext


def steps_are_logged(context: RuleContext, name: str) -> Iterator[Problem]:
    """`name`, a number of steps or None, must be a multiple of `logging.every`."""
    every, logged = context.value(name), context.config.logging.every
    if every is not None and every % logged:
        yield context.problem(
            name,
            "logging.every",
            rule="must be a multiple of logging.every, since they are part of the logged lines",
            fix=f"use {-(-every // logged) * logged}",
        )
