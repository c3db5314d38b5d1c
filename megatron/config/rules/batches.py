"""Stages of batch size (`training.batch_schedule`)."""

from __future__ import annotations

from collections.abc import Iterator

from ..arithmetic.batches import batches_of
from ..arithmetic.divisors import multiples
from ..arithmetic.pipelines import in_rounds, is_file, least_micro_batches
from ..problems import Problem
from ..rule_context import RuleContext
from .check import Check

SCHEDULE = ("training", "batch_schedule")


def stages_end_one_after_the_other(context: RuleContext) -> Iterator[Problem]:
    training = context.config.training
    ends, begins = batches_of(context.config).begins[1:], batches_of(context.config).begins
    for number, entry in enumerate(training.batch_schedule):
        if (entry.until is None) == (entry.until_tokens is None):
            yield context.problem_at(
                (*SCHEDULE, number),
                rule="must have an end, given once: until (steps) or until_tokens",
                fix="give until, or until_tokens",
            )
            continue
        key = "until" if entry.until is not None else "until_tokens"
        if (entry.until or ends[number]) <= begins[number]:
            yield context.problem_at(
                (*SCHEDULE, number, key),
                rule=f"must be above the end of the stage before, step {begins[number]:,}",
                fix="use a later end, or remove the stage",
            )
        elif ends[number] >= training.steps > 0:
            yield context.problem_at(
                (*SCHEDULE, number, key),
                "training.steps",
                fatal=False,
                rule=f"must end before training.steps, here at step {ends[number]:,}: the run has no step with "
                f"training.global_batch_size = {training.global_batch_size}",
                fix="use an earlier end, or more steps",
            )


def ranks_share_each_batch(context: RuleContext) -> Iterator[Problem]:
    """Each batch has whole micro-batches on every data parallel rank."""
    training, ranks = context.config.training, context.data_ranks
    unit = training.micro_batch_size * (ranks or 1)
    for number, entry in enumerate(training.batch_schedule if ranks else ()):
        if entry.global_batch_size % unit:
            yield context.problem_at(
                (*SCHEDULE, number, "global_batch_size"),
                "training.micro_batch_size",
                rule=f"must be a multiple of micro_batch_size * data parallel size, here {training.micro_batch_size} * "
                f"{ranks} = {unit}",
                fix=f"use {multiples(entry.global_batch_size, unit)}",
            )
        elif in_rounds(context.config.parallel) and entry.global_batch_size % (unit * context.config.parallel.pipeline):
            whole = unit * context.config.parallel.pipeline
            yield context.problem_at(
                (*SCHEDULE, number, "global_batch_size"),
                "parallel.schedule",
                rule=f"the micro-batches of a step must be a multiple of the pipeline's ranks: a batch is n * {whole}",
                fix=f"use {multiples(entry.global_batch_size, whole)}",
            )
        elif entry.global_batch_size < unit * least_micro_batches(context.config.parallel):
            least = least_micro_batches(context.config.parallel)
            yield context.problem_at(
                (*SCHEDULE, number, "global_batch_size"),
                "parallel.schedule",
                rule=f"a step must have at least {least} micro-batches, twice the pipeline's ranks",
                fix=f"use {least * unit} or more, or parallel.schedule=zbv",
            )


CHECKS = (
    Check(
        "data.epoch_parts training.batch_schedule",
        lambda c: c.training.batch_schedule and c.data.epoch_parts != 1,
        "must be 1 with batches of several sizes: an epoch ends with whole parts of one size",
        "remove it, or use a run of its own for each batch size",
    ),
    Check(
        "parallel.schedule training.batch_schedule",
        lambda c: c.training.batch_schedule and is_file(c.parallel.schedule),
        "must not be a file, which is for one number of micro-batches, with batches of several sizes",
        "use interleaved or zb_h1",
    ),
)
