"""Parametrizations: their base model is known, and their rates are derived for the optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from ..optimizer_kind import kinds_inside, optimizer_kind
from ..problems import Problem
from ..rule_context import RuleContext

SECTION = "model.parametrization"
BOTH, DEPTH = ("mup", "completep"), ("completep",)
READERS = {"base_width": BOTH, "base_head_dim": BOTH, "base_depth": DEPTH, "depth_exponent": DEPTH}
NEEDED = {"base_width": "model.hidden_size", "base_depth": "the number of blocks"}


def options_suit_the_parametrization(context: RuleContext) -> Iterator[Problem]:
    own = context.config.model.parametrization
    for name, types in READERS.items():
        keys = f"{SECTION}.{name} {SECTION}.type"
        if own.type in types and name in NEEDED and getattr(own, name) is None:
            yield context.problem(
                keys,
                rule=f"{own.type} must have a base model, which the rates and initial values were found for",
                fix=f"give {SECTION}.{name}, {NEEDED[name]} of that model",
            )
        if own.type not in types and context.given(f"{SECTION}.{name}"):
            rule = f"{name} must go with type: {' or '.join(types)}, and has no effect here"
            yield context.warning(keys, rule=rule, fix="remove it, or change the type")


def rates_are_derived_for_the_optimizer(context: RuleContext) -> Iterator[Problem]:
    type, optimizer = context.config.model.parametrization.type, context.config.optimizer.type
    kind = optimizer_kind(context.config)
    if type == "standard" or (kind is not None and type in kind.rates_for):
        return
    if kind is not None:
        able = [name for name, each in kinds_inside().items() if type in each.rates_for]
        yield context.problem(
            f"{SECTION}.type optimizer.type",
            rule=f"the rates of {type} must be derived for the optimizer, as they are for {', '.join(able)}, but not "
            f"for {optimizer}: {kind.why_no_rates}",
            fix="use optimizer.type=adamw, or type: standard",
        )
    else:
        yield context.warning(
            f"{SECTION}.type optimizer.type",
            rule=f"the rates of {type} must be for an optimizer whose steps do not depend on the size of gradients",
            fix="give other factors in the optimizer's group_settings (scales), if its steps do",
        )
