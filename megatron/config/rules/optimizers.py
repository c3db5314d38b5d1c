"""The run's optimizer: keys that it reads, its options, its package, and its own rules."""

from __future__ import annotations

from collections.abc import Iterator

from ..arithmetic.kernels import has_file, installed
from ..optimizer_kind import SHARED, kinds_inside, optimizer_kind, unknown_options
from ..problems import Problem
from ..rule_context import RuleContext


def optimizer_keeps_its_rules(context: RuleContext) -> Iterator[Problem]:
    """Keys that it reads, its options and its own rules. A class without a kind checks them itself."""
    kind = optimizer_kind(context.config)
    if kind is None:
        return
    for name in (name for name in SHARED if name not in kind.reads and context.given(f"optimizer.{name}")):
        readers = [each for each, inside in kinds_inside().items() if name in inside.reads]
        rule = f"{name} must go with {', '.join(readers)}, and has no effect here"
        yield context.warning(f"optimizer.{name} optimizer.type", rule=rule, fix="remove it, or change optimizer.type")
    yield from unknown_options(context, "optimizer", kind.options)
    for own in kind.rules:
        yield from own(context)


def packages_are_here(context: RuleContext) -> Iterator[Problem]:
    kind = optimizer_kind(context.config)
    package = None if kind is None else kind.package
    if package is None or not context.starts_here or has_file(package.name, package.file):
        return
    here = f", and the installed {package.name} has no {package.file}" if installed(package.name) else ""
    yield context.problem(
        "optimizer.type",
        rule=f"must be one whose package is installed: {context.config.optimizer.type} needs {package.name}{here}",
        fix=f"{package.command}, or use adamw",
    )


def input_rules_of_its_own(context: RuleContext) -> Iterator[Problem]:
    kind = optimizer_kind(context.config)
    for rule in () if kind is None else kind.input_rules:
        yield from rule(context)


INPUT_RULES = (packages_are_here, input_rules_of_its_own)
