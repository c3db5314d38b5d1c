"""Rules about keys together. Each is a function of `Facts` that yields a `Problem` for each breach; they are
listed in `RULES` at the end of their file, by concern, or in `INPUT_RULES` if only a start needs them: data,
tokenizers and checkpoints that exist, which a tool that shows or counts a model does not ask for."""

from __future__ import annotations

from ..facts import Facts
from ..problems import Problem
from . import data, deepspeed, launch, layout, model, moe, output, recipe, rwkv, schedule

MODULES = (model, moe, rwkv, layout, recipe, schedule, data, output, launch, deepspeed)


def broken(facts: Facts, inputs: bool) -> list[Problem]:
    """All problems that the rules find; with `inputs` also those that only a start has."""
    chosen = [rule for module in MODULES for rule in module.RULES]
    if inputs:
        chosen += [rule for module in MODULES for rule in getattr(module, "INPUT_RULES", ())]
    return [problem for rule in chosen for problem in rule(facts)]
