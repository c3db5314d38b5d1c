"""A recurrent core: layers that can be repeated, on one pipeline stage, without dropout inside."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.arithmetic.divisors import uniform_counts

from ..arithmetic.recurrence import core_of
from ..problems import Problem
from ..rule_context import RuleContext
from ..sections.recurrence import RecurrenceOptions

SECTION = "model.recurrence"


def options_need_a_core(context: RuleContext) -> Iterator[Problem]:
    if core_of(context.blocks) or not context.blocks:
        return
    for name in RecurrenceOptions.model_fields:
        if context.given(f"{SECTION}.{name}"):
            yield context.warning(
                f"{SECTION}.{name} model.layers",
                rule="must go with a recurrent group in model.layers, and has no effect here",
                fix="write recurrent(...) around the blocks that are repeated, or remove the key",
            )


def layers_can_be_repeated(context: RuleContext) -> Iterator[Problem]:
    kinds = [each for index in core_of(context.blocks) for each in context.blocks[index].kinds]
    for name in dict.fromkeys(each.name for each in kinds):
        if not context.kinds[name].repeats:
            able = ", ".join(sorted(each for each, kind in context.kinds.items() if kind.repeats))
            yield context.problem(
                "model.layers",
                rule=f"layers of a recurrent group must be of kinds that can be repeated, and {name} is none: it "
                "carries something from layer to layer, or counts by layer",
                fix=f"put {name} before or after the group, in which there may be {able}",
            )


def nothing_is_drawn_inside(context: RuleContext) -> Iterator[Problem]:
    """Dropout is keyed by layer and sample, and would be the same in all passes."""
    core = core_of(context.blocks)
    if core and context.config.model.dropout > 0.0:
        rule = "must be 0 with a recurrent group, whose passes would all drop the same"
        yield context.problem("model.dropout model.layers", rule=rule, fix="use model.dropout=0")
    inside = dict.fromkeys((each.name, each.variant) for index in core for each in context.blocks[index].kinds)
    for use in context.used:
        if (use.kind, use.variant) in inside and context.kinds[use.kind].draws(use.options):
            rule = f"a recurrent group must draw nothing: all passes of {use.kind} would draw the same"
            fix = f"use {use.kind} without dropout or noise inside of the group"
            yield context.problem("model.layers", rule=rule, fix=fix)


def core_is_on_one_stage(context: RuleContext) -> Iterator[Problem]:
    core, parallel = core_of(context.blocks), context.config.parallel
    if not core or parallel.pipeline == 1:
        return
    units, split = len(context.blocks) - len(core) + 1, parallel.pipeline_split
    stages = parallel.pipeline * parallel.stages_per_rank
    if split == "parameters":
        if units < stages:
            yield context.problem(
                "parallel.pipeline model.layers",
                rule=f"a recurrent group must be on one pipeline stage, and with it there are {units} parts",
                fix=f"use parallel.pipeline of at most {units}, and parallel.tensor for parts that are too large",
            )
        return
    counts = uniform_counts(len(context.blocks), stages) if split == "uniform" else list(split)
    borders = [sum(counts[: stage + 1]) for stage in range(len(counts) - 1)]
    if any(core.start < border < core.stop for border in borders):
        yield context.problem(
            "parallel.pipeline_split model.layers",
            rule=f"a recurrent group must be on one pipeline stage: blocks {core.start} to {core.stop - 1}",
            fix="use parallel.pipeline_split=parameters, which keeps it together, or another list",
        )


def depth_is_known_to_completep(context: RuleContext) -> Iterator[Problem]:
    if core_of(context.blocks) and context.config.model.parametrization.type == "completep":
        yield context.problem(
            "model.parametrization.type model.layers",
            rule="completep must have a depth, and a recurrent group draws one in each step: no rule for it is known",
            fix="use type: mup, whose factors of width hold for it, or type: standard",
        )
