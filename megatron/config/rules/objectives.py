"""The run's objective: keys that it reads, its options, and its own rules."""

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
            f"objective.{name} objective.type",
            rule=f"objective.{name} must come with objective.type: {' or '.join(readers)}",
            fix=f"set objective.type={readers[0]}, or remove objective.{name}",
            fatal=context.value(f"objective.{name}") != ObjectiveSection.model_fields[name].default,
        )


# Keys that an objective with costs of whole sequences cannot have, since it computes them in two passes.
WHOLE = {
    "training.z_loss": 0,
    "training.sequence_chunks": 1,
    "training.sequence_schedule": [],
    "model.multi_token_prediction.depth": 0,
}


def objective_keeps_its_rules(context: RuleContext) -> Iterator[Problem]:
    """Its options, its own rules, and whole sequences where its costs depend on them."""
    kind = objective_kind(context.config)
    if kind is None:
        return
    yield from unknown_options(context, "objective", kind.options)
    for key, none in WHOLE.items() if kind.labels else ():
        if (value := context.option(key)) and value != none:
            rule = f"must be {none} with an objective that computes costs from whole sequences"
            yield context.problem(f"{key} objective.type", rule=rule, fix=f"use {key}={none}, or another objective")
    for own in kind.rules:
        yield from own(context)
