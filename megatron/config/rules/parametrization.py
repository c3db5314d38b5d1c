"""Parametrizations: their base model is known, and the optimizer is one that their rates are derived for."""

from __future__ import annotations

from collections.abc import Iterator

from ..problems import Problem
from ..registry import INSIDE, OPTIMIZER
from ..rule_context import RuleContext

# An element's step follows from the history of its own gradient and does not depend on its size: Adam's exponents hold
# for all of these (Yang & Littwin 2023, arXiv 2308.01814). Muon's steps have a size of their own; SGD's depend on the
# gradient's, and have rates of their own under muP. Steps from means over rows, blocks or eigenbases are neither. The
# learned steps of small_fc_lopt have Adam's rates under muP (MuLO, Thérien et al. 2024, arXiv 2406.00153).
ELEMENTWISE = ("adamw", "adamw_8bit", "lion", "ademamix", "schedule_free_adamw")
DERIVED_FOR = {"mup": (*ELEMENTWISE, "muon", "sgd", "small_fc_lopt"), "completep": (*ELEMENTWISE, "muon")}
WHY_NOT = {"sgd": "its steps depend on the size of gradients", "small_fc_lopt": "its rates are known over widths alone"}
MEANS = "its steps depend on means over rows, blocks or eigenbases of a matrix"
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
    able = DERIVED_FOR.get(type)
    if able is None or optimizer in able:
        return
    if optimizer in INSIDE[OPTIMIZER]:
        yield context.problem(
            f"{SECTION}.type",
            "optimizer.type",
            rule=f"the rates of {type} must be derived for the optimizer, and are so for {', '.join(able)}; "
            f"they are not for {optimizer}: {WHY_NOT.get(optimizer, MEANS)}",
            fix="use optimizer.type=adamw, or type: standard",
        )
    else:
        yield context.warning(
            f"{SECTION}.type",
            "optimizer.type",
            rule=f"the rates of {type} must be for an optimizer whose steps do not depend on the size of gradients",
            fix="give other factors in the optimizer's group_settings (scales), if its steps do",
        )


def heads_are_not_orthogonalised_alone(context: RuleContext) -> Iterator[Problem]:
    """A stack of orthogonal heads has a norm that grows with their number."""
    own, optimizer = context.config.model.parametrization, context.config.optimizer
    if own.type != "standard" and optimizer.type == "muon" and optimizer.options.get("per_head") is True:
        yield context.problem(
            "optimizer.options",
            f"{SECTION}.type",
            rule=f"the rates of {own.type} must be derived for the optimizer, and are so for muon without per_head",
            fix="remove per_head, or use type: standard",
        )


RULES = (
    base_is_known,
    options_suit_the_parametrization,
    rates_are_derived_for_the_optimizer,
    heads_are_not_orthogonalised_alone,
)
