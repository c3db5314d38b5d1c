"""Rules about keys together, by concern: functions of a `RuleContext` that yield a `Problem` for each breach.

A file has them as functions with that signature and, where one expression is enough, as rows of `CHECKS`. `INPUT_RULES`
has rules of a start: data, tokenizers and checkpoints exist. A tool that shows or counts a model skips them. Rules of a
kind of layer are in its folder (`kind.LayerKind`)."""

import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import get_type_hints

from ..features.feature import features_of
from ..problems import Problem
from ..rule_context import RuleContext

Rule = Callable[[RuleContext], Iterator[Problem]]
# The order in which their problems are shown.
_NAMES = (
    "model layout columns sequences communication recipe gpu teacher objectives schedule data streams "
    "output launch deepspeed cost"
)


def _written(module: ModuleType) -> list[Rule]:
    """The rules of a module: its functions in the order of the file, then its table."""
    functions = (each for each in vars(module).values() if inspect.isfunction(each))
    own = (each for each in functions if each.__module__ == module.__name__)
    rules = (each for each in own if get_type_hints(each).get("return") == Iterator[Problem])
    return [*rules, *getattr(module, "CHECKS", ())]


MODULES: tuple[ModuleType, ...] = tuple(import_module(f"{__name__}.{name}") for name in _NAMES.split())
INPUT_RULES: tuple[Rule, ...] = tuple(rule for module in MODULES for rule in getattr(module, "INPUT_RULES", ()))
RULES: tuple[Rule, ...] = tuple(rule for module in MODULES for rule in _written(module) if rule not in INPUT_RULES)


def broken(context: RuleContext, inputs: bool) -> list[Problem]:
    """All problems that the rules find. `inputs`: with the rules of a start."""
    found = [problem for rule in (*RULES, *(INPUT_RULES if inputs else ())) for problem in rule(context)]
    for use in context.used:
        found += [problem for rule in context.kinds[use.kind].rules for problem in rule(use)]
    for feature in features_of(tuple(context.config.model.extensions)).values():
        found += [problem for rule in feature.rules for problem in rule(context)]
    for kind in context.kinds.values():
        found += [problem for rule in kind.stack_rules for problem in rule(context)]
    return found
