"""Rules about keys together. Each is a function of `RuleContext` that yields a `Problem` for each breach; they are
listed in `RULES` at the end of their file, by concern, or in `INPUT_RULES` if only a start needs them: data,
tokenizers and checkpoints that exist, which a tool that shows or counts a model does not ask for. What a kind of layer
needs stands with the kind (`kind.LayerKind`)."""

from __future__ import annotations

from ..features.feature import features_of
from ..problems import Problem
from ..rule_context import RuleContext
from . import (
    chunks,
    communication,
    cost,
    data,
    deepspeed,
    distillation,
    launch,
    layout,
    levels,
    model,
    names,
    optimizers,
    output,
    parametrization,
    recipe,
    recurrence,
    schedule,
    sequences,
    span_corruption,
    spikes,
    stages,
)
from .gpu import async_tensor, cuda_graphs, fused_attention

MODULES = (
    names,
    model,
    recurrence,
    parametrization,
    layout,
    sequences,
    stages,
    async_tensor,
    communication,
    chunks,
    recipe,
    cuda_graphs,
    fused_attention,
    distillation,
    optimizers,
    schedule,
    data,
    span_corruption,
    output,
    levels,
    spikes,
    launch,
    deepspeed,
    cost,
)


def broken(context: RuleContext, inputs: bool) -> list[Problem]:
    """All problems that the rules find; with `inputs` also those that only a start has."""
    chosen = [rule for module in MODULES for rule in module.RULES]
    if inputs:
        chosen += [rule for module in MODULES for rule in getattr(module, "INPUT_RULES", ())]
    found = [problem for rule in chosen for problem in rule(context)]
    for use in context.used:
        found += [problem for rule in context.kinds[use.kind].rules for problem in rule(use)]
    for feature in features_of(tuple(context.config.model.extensions)).values():
        found += [problem for rule in feature.rules for problem in rule(context)]
    for kind in context.kinds.values():
        found += [problem for rule in kind.stack_rules for problem in rule(context)]
    return found
