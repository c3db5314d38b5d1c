"""Stages of sequence length (`training.sequence_schedule`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..arithmetic.divisors import divisors, near
from ..kind import KindUse
from ..problems import Problem
from ..rule_context import RuleContext
from ..sections.rotary import RotaryOptions
from ..source.structure import nearest
from ..stages import as_stage, stages_of
from .check import Check, check_order

SCHEDULE = ("training", "sequence_schedule")
_LENGTH = "training.sequence_length"


def stages_follow_each_other(context: RuleContext) -> Iterator[Problem]:
    schedule, steps = context.config.training.sequence_schedule, context.config.training.steps
    yield from check_order(context, SCHEDULE, "until", schedule, "end of the stage")
    for number, entry in enumerate(schedule):
        if entry.until >= steps > 0:
            yield context.problem_at(
                (*SCHEDULE, number, "until"),
                "training.steps",
                fatal=False,
                rule=f"must be below training.steps: the run ends before it reaches training.sequence_length = "
                f"{context.config.training.sequence_length}",
                fix=f"use a step below {steps}, or more steps",
            )


def samples_are_cut_into_equal_pieces(context: RuleContext) -> Iterator[Problem]:
    """Each stage's length divides the longest one, and ranks that share a sequence have equal parts of a piece."""
    parallel, longest = context.config.parallel, context.config.training.sequence_length
    ranks = {"parallel.tensor": parallel.tensor if parallel.sequence else 1, "parallel.context": parallel.context}
    others = [name for name, size in ranks.items() if size > 1]
    unit = math.lcm(math.prod(ranks.values()), 2 * parallel.context if context.zigzag else 1)
    legal = [each for each in divisors(longest) if each % unit == 0]
    for number, entry in enumerate(context.config.training.sequence_schedule):
        if entry.sequence_length in legal:
            continue
        parts = f", and be a multiple of {unit}: ranks have equal parts of it" if unit > 1 else ""
        choice = near(entry.sequence_length, legal)
        yield context.problem_at(
            (*SCHEDULE, number, "sequence_length"),
            _LENGTH,
            *others,
            rule=f"must divide {_LENGTH} = {longest}, since samples are cut into equal pieces{parts}",
            fix=f"use {choice} tokens" if choice else "use fewer ranks for a sequence",
        )


def stages_turn_layers_that_turn(context: RuleContext) -> Iterator[Problem]:
    """Rotary options of a stage belong to a kind, or to a variant, of the pattern that has rotary positions."""
    able = {
        f"{use.kind}@{use.variant}" if use.variant else use.kind: use
        for use in context.used
        if isinstance(getattr(use.options, "rotary", None), RotaryOptions) and use.options.position == "rotary"
    }
    kinds = list(dict.fromkeys([*able, *(use.kind for use in able.values())]))
    for number, entry in enumerate(context.config.training.sequence_schedule):
        for name, own in entry.rotary.items():
            path = (*SCHEDULE, number, "rotary", name)
            if name not in kinds:
                yield context.problem_at(
                    path,
                    "model.layers",
                    rule=f"must be a kind with rotary positions, and this model has {', '.join(kinds) or 'none'}",
                    fix=nearest(name, kinds) or "remove it",
                )
            for use in able.values():
                if use.kind == name.partition("@")[0] and getattr(use.options, "mscale_all_dim", None):
                    if own.scaling != use.options.rotary.scaling:
                        yield context.problem_at(
                            (*path, "scaling"),
                            use.key(".mscale_all_dim"),
                            rule="must be the model's, since its scale of attention follows from it (mscale_all_dim)",
                            fix="give the stage the scaling of the model, or use mscale_all_dim: 0",
                        )


def each_stage_keeps_the_rules_of_layers(context: RuleContext) -> Iterator[Problem]:
    """Rules of kinds about lengths and rotary options hold in each stage."""
    if not context.config.training.sequence_schedule or any(samples_are_cut_into_equal_pieces(context)):
        return
    known = {problem.rule for use in context.used for problem in _problems(context, use)}
    for stage in stages_of(context.config)[:-1]:
        at = replace(context, config=as_stage(context.config, stage))
        for use in at.used:
            for problem in _problems(context, use):
                if problem.rule not in known:
                    path = _path(problem.key, stage.number, use.kind, use.variant)
                    yield context.problem_at(path, rule=problem.rule, fix=problem.fix, fatal=problem.fatal)


def _problems(context: RuleContext, use: KindUse[Any]) -> list[Problem]:
    return [problem for rule in context.kinds[use.kind].rules for problem in rule(use)]


def _path(key: str, number: int, kind: str, variant: str | None) -> tuple[str | int, ...]:
    """The place in the schedule of a key of the stage's own configuration."""
    _, found, option = key.partition(".rotary.")
    name = f"{kind}@{variant}" if variant and key.startswith("model.variants.") else kind
    if found:
        return (*SCHEDULE, number, "rotary", name, *option.split("."))
    return (*SCHEDULE, number, "sequence_length")


CHECKS = (
    Check(
        "data.packing training.sequence_schedule",
        lambda c: c.training.sequence_schedule and c.data.packing != "continuous",
        lambda c: (
            f"must be continuous for samples that are cut: {c.data.packing} packs whole documents into "
            f"{c.training.sequence_length} tokens, and shorter stages cut some of these"
        ),
        "use data.packing: continuous, or a run of its own for each length",
        fatal=False,
    ),
)
