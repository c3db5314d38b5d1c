"""The run's optimizer: keys that it reads, its options, its package, and its own rules."""

from __future__ import annotations

from collections.abc import Iterator

from ..arithmetic.kernels import has_file, installed
from ..optimizer_kind import SHARED, kinds_inside, optimizer_kind, unknown_options
from ..problems import Problem
from ..rule_context import RuleContext


def keys_are_read(context: RuleContext) -> Iterator[Problem]:
    kind = optimizer_kind(context.config)
    for name in SHARED if kind is not None else ():  # a class without a kind may read any of them
        if kind is not None and name not in kind.reads and context.given(f"optimizer.{name}"):
            readers = [each for each, inside in kinds_inside().items() if name in inside.reads]
            yield context.warning(
                f"optimizer.{name}",
                "optimizer.type",
                rule=f"{name} must go with {', '.join(readers)}; it has no effect here",
                fix="remove it, or change optimizer.type",
            )


def options_are_the_optimizers(context: RuleContext) -> Iterator[Problem]:
    """`optimizer.options` of an optimizer that declares them; a class without a kind checks its own."""
    kind = optimizer_kind(context.config)
    if kind is not None:
        yield from unknown_options(context, "optimizer", kind.options)


def packages_are_here(context: RuleContext) -> Iterator[Problem]:
    kind = optimizer_kind(context.config)
    package = None if kind is None else kind.package
    if package is None or not context.starts_here or has_file(package.name, package.file):
        return
    here = f"; the package {package.name} that is installed has no {package.file}" if installed(package.name) else ""
    yield context.problem(
        "optimizer.type",
        rule=f"must be one whose package is installed: {context.config.optimizer.type} needs {package.name}{here}",
        fix=f"{package.command}, or use adamw",
    )


def rules_of_its_own(context: RuleContext) -> Iterator[Problem]:
    kind = optimizer_kind(context.config)
    for rule in () if kind is None else kind.rules:
        yield from rule(context)


def input_rules_of_its_own(context: RuleContext) -> Iterator[Problem]:
    kind = optimizer_kind(context.config)
    for rule in () if kind is None else kind.input_rules:
        yield from rule(context)


INPUT_RULES = (packages_are_here, input_rules_of_its_own)
