"""Lengths and layers with `training.sequence_chunks`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..arithmetic.divisors import divisors, multiples, near
from ..problems import Problem
from ..rule_context import RuleContext
from ..sequences import choose_method

KEY = "training.sequence_chunks"


def chunks_are_equal(context: RuleContext) -> Iterator[Problem]:
    training, parallel = context.config.training, context.config.parallel
    cuts = {"parallel.context": parallel.context, "parallel.tensor": parallel.tensor if parallel.sequence else 1}
    cuts = {name: ranks for name, ranks in cuts.items() if ranks > 1}
    unit = training.sequence_chunks * math.prod(cuts.values())
    if training.sequence_chunks > 1 and training.sequence_length % unit:
        yield context.problem(
            " ".join(("training.sequence_length", KEY, *cuts, *["parallel.sequence"] * ("parallel.tensor" in cuts))),
            rule=f"must be a multiple of {' * '.join((KEY, *cuts))} = {unit}, since all chunks have the same length",
            fix=f"use {multiples(training.sequence_length, unit)} tokens, or another number of chunks",
        )


def layers_continue_from_chunks(context: RuleContext) -> Iterator[Problem]:
    """A layer computes one chunk at a time. One that mixes tokens must continue from its state after earlier chunks."""
    if context.config.training.sequence_chunks == 1:
        return
    unable = dict.fromkeys(use.kind for use in context.used if not context.kinds[use.kind].context)
    reasons = [f"{', '.join(unable)} layers, which need all tokens at once"] if unable else []
    if any(block.recurrent for block in context.blocks):
        reasons.append("a recurrent(...) group, whose blocks run several times over the same tokens")
    for reason in reasons:
        fix = "remove sequence_chunks, and use training.activation_checkpointing.mode: full"
        yield context.problem(f"{KEY} model.layers", rule=f"must be 1 with {reason}", fix=fix)


def ranks_share_chunks(context: RuleContext) -> Iterator[Problem]:
    """Ranks that share sequences work on one chunk together, and then on the next."""
    config, parallel = context.config, context.config.parallel
    if config.training.sequence_chunks == 1 or parallel.context == 1:
        return
    for use in context.used:
        heads, about = getattr(use.options, "heads", None), context.kinds[use.kind]
        if about.context == "states":
            yield context.problem(
                f"{KEY} parallel.context model.layers",
                rule=f"must be 1 with {use.kind} layers where ranks share sequences: these run on one rank after the "
                "other. The first rank would begin a chunk before the last has finished the previous one",
                fix="use one of both",
            )
        if about.context != "attends" or not heads or heads % parallel.tensor:
            continue
        own = heads // parallel.tensor
        method = choose_method(parallel.context_method, own, parallel.context, parallel.context_ulysses)
        if method.name != "ulysses" or own % parallel.context:
            others = near(parallel.context, divisors(own))
            ranks = f"parallel.context = {others} and " if own % parallel.context else ""
            yield context.problem(
                f"parallel.context {KEY} {use.key('.heads')} parallel.context_method",
                rule=f"must divide the {own} query heads of {use.kind} on each rank with sequence_chunks, and "
                "context_method be ulysses: keys of earlier chunks are kept by heads",
                fix=f"use {ranks}context_method: auto, or sequence_chunks: 1",
            )
    if context.zigzag:
        rule = "must be contiguous with sequence_chunks: all ranks work on one chunk at a time"
        yield context.problem(f"parallel.context_cut {KEY}", rule=rule, fix="remove context_cut")


def chunks_are_recomputed(context: RuleContext) -> Iterator[Problem]:
    training = context.config.training
    checkpointing = training.activation_checkpointing
    if training.sequence_chunks > 1 and (checkpointing.mode == "selective" or checkpointing.every > 1):
        name, value = ("mode", "none or full") if checkpointing.mode == "selective" else ("every", "1")
        yield context.problem(
            f"training.activation_checkpointing.{name} {KEY}",
            rule=f"must be {value} with sequence_chunks, which keeps only a block's input and recomputes each chunk",
            fix=f"remove {name}",
        )
