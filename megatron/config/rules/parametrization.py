"""Parametrizations: their base model is known, and the optimizer is one that their rates are derived for."""

from __future__ import annotations

from collections.abc import Iterator

from ..optimizer_kind import kinds_inside, optimizer_kind
from ..problems import Problem
from ..rule_context import RuleContext

SECTION = "model.parametrization"


def base_is_known(context: RuleContext) -> Iterator[Problem]:
    own = context.config.model.parametrization
    if own.type == "standard":
        return
    needed = ("base_width",) if own.type == "mup" else ("base_width", "base_depth")
    what = {"base_width": "model.hidden_size", "base_depth": "the number of blocks"}
    for name in needed:
        if getattr(own, name) is None:
            yield context.problem(
                f"{SECTION}.{name}",
                f"{SECTION}.type",
                rule=f"{own.type} must have a base model, which the rates and initial values were found for",
                fix=f"give {SECTION}.{name}, {what[name]} of that model",
            )


def options_suit_the_parametrization(context: RuleContext) -> Iterator[Problem]:
    own = context.config.model.parametrization
    users = {
        "base_width": ("mup", "completep"),
        "base_head_dim": ("mup", "completep"),
        "base_depth": ("completep",),
        "depth_exponent": ("completep",),
    }
    for name, types in users.items():
        if own.type not in types and context.given(f"{SECTION}.{name}"):
            yield context.warning(
                f"{SECTION}.{name}",
                f"{SECTION}.type",
                rule=f"{name} must go with type: {' or '.join(types)}; it has no effect here",
                fix="remove it, or change the type",
            )


def rates_are_derived_for_the_optimizer(context: RuleContext) -> Iterator[Problem]:
    type, optimizer = context.config.model.parametrization.type, context.config.optimizer.type
    kind = optimizer_kind(context.config)
    if type == "standard" or (kind is not None and type in kind.rates_for):
        return
    if kind is not None:
        able = [name for name, each in kinds_inside().items() if type in each.rates_for]
        yield context.problem(
            f"{SECTION}.type",
            "optimizer.type",
            rule=f"the rates of {type} must be derived for the optimizer, and are so for {', '.join(able)}; "
            f"they are not for {optimizer}: {kind.why_no_rates}",
            fix="use optimizer.type=adamw, or type: standard",
        )
    else:
        yield context.warning(
            f"{SECTION}.type",
            "optimizer.type",
            rule=f"the rates of {type} must be for an optimizer whose steps do not depend on the size of gradients",
            fix="give other factors in the optimizer's group_settings (scales), if its steps do",
        )
