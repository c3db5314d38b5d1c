"""The run's objective: keys that it reads, its options, and its own rules."""

from __future__ import annotations

from collections.abc import Iterator

from ..features.objective_kind import objective_kind, objectives_inside
from ..optimizer_kind import unknown_options
from ..problems import Problem
from ..rule_context import RuleContext
from ..sections.recipe import ObjectiveSection


def keys_are_read(context: RuleContext) -> Iterator[Problem]:
    """A run with a teacher, or with k, and without the type would train without it. A resolved file has all keys."""
    kind = objective_kind(context.config)
    for name in ObjectiveSection.model_fields if kind is not None else ():  # a class without a kind may read any
        if kind is None or name in ("type", "options", *kind.reads) or not context.given(f"objective.{name}"):
            continue
        readers = [each for each, inside in objectives_inside().items() if name in inside.reads]
        yield context.problem(
            f"objective.{name}",
            "objective.type",
            rule=f"objective.{name} must come with objective.type: {' or '.join(readers)}",
            fix=f"set objective.type={readers[0]}, or remove objective.{name}",
            fatal=context.value(f"objective.{name}") != ObjectiveSection.model_fields[name].default,
        )


def options_are_the_objectives(context: RuleContext) -> Iterator[Problem]:
    kind = objective_kind(context.config)
    if kind is not None:
        yield from unknown_options(context, "objective", kind.options)


def two_passes_see_whole_sequences(context: RuleContext) -> Iterator[Problem]:
    """Of an objective whose costs depend on whole sequences, and are known after the first of two passes."""
    kind = objective_kind(context.config)
    if kind is None or not kind.labels:
        return
    for key, none in (
        ("training.z_loss", 0),
        ("training.sequence_chunks", 1),
        ("training.sequence_schedule", []),
        ("model.multi_token_prediction.depth", 0),
    ):
        if (value := context.option(key)) and value != none:
            yield context.problem(
                key,
                "objective.type",
                rule=f"must be {none} with an objective that computes costs from whole sequences",
                fix=f"use {key}={none}, or another objective",
            )


def rules_of_its_own(context: RuleContext) -> Iterator[Problem]:
    kind = objective_kind(context.config)
    for rule in () if kind is None else kind.rules:
        yield from rule(context)
