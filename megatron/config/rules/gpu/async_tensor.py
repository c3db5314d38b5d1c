"""Products that overlap with messages (`parallel.async_tensor`)."""

from __future__ import annotations

from collections.abc import Iterator

from ...problems import Problem
from ...rule_context import RuleContext

KEY, OFF = "parallel.async_tensor", "parallel.async_tensor=false"

# (another key, whether its value forbids overlap, the need of overlap, a value that it can have)
FORBIDDEN = (
    ("parallel.sequence", lambda it: not it, "activations that tensor ranks share", "true"),
    ("parallel.communication.compress.tensor", lambda it: it != "none", "uncompressed activations", "none"),
    ("zero.stage", lambda it: it == 3, "weights that stay where they are", "2"),
    ("training.activation_checkpointing.mode", lambda it: it != "none", "each product once a step", "none"),
    ("training.sequence_chunks", lambda it: it > 1, "whole sequences in a pass", "1"),
)


def async_products_have_messages(context: RuleContext) -> Iterator[Problem]:
    parallel = context.config.parallel
    if not parallel.async_tensor:
        return
    if parallel.tensor == 1:
        # As with `parallel.sequence`, no error: plans and evaluations read a run's file for other layouts too.
        rule = "products that overlap with messages must go with tensor parallelism, without which they have no effect"
        yield context.warning(KEY, "parallel.tensor", rule=rule, fix=f"use {OFF}, or parallel.tensor of 2 or more")
        return
    for other, forbids, need, fix in FORBIDDEN:
        if forbids(context.value(other)):
            rule = f"products that overlap with messages must have {need}"
            yield context.problem(KEY, other, rule=rule, fix=f"use {OFF}, or {other}={fix}")
    island = parallel.communication.island
    if island is not None and island % parallel.tensor:
        other = "parallel.communication.island"
        rule = f"must be a multiple of parallel.tensor = {parallel.tensor}, whose ranks must share fast links"
        yield context.problem(other, KEY, rule=rule, fix=f"use {OFF}, or {other}={parallel.tensor}")
