"""What layers that work on a sequence in chunks ask of lengths and layers (`training.sequence_chunks`)."""

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
        also = (*cuts, "parallel.sequence") if "parallel.tensor" in cuts else tuple(cuts)
        yield context.problem(
            "training.sequence_length",
            KEY,
            *also,
            rule=f"must be a multiple of {' * '.join((KEY, *cuts))} = {unit}: chunks have equally many tokens",
            fix=f"use {multiples(training.sequence_length, unit)} tokens, or another number of chunks",
        )


def layers_go_on_from_chunks(context: RuleContext) -> Iterator[Problem]:
    """A layer has one chunk at a time; one that looks beyond a token must go on from what it kept of those before."""
    config = context.config
    if config.training.sequence_chunks == 1:
        return
    unable = [use.kind for use in context.used if not context.kinds[use.kind].context]
    if unable:
        yield context.problem(
            KEY,
            "model.layers",
            rule=f"must be 1 with {', '.join(dict.fromkeys(unable))} layers, which need all tokens at once",
            fix="leave sequence_chunks out, and use training.activation_checkpointing.mode: full",
        )
    if any(block.recurrent for block in context.blocks or ()):
        yield context.problem(
            KEY,
            "model.layers",
            rule="must be 1 with a recurrent(...) group, whose blocks run several times over the same tokens",
            fix="leave sequence_chunks out, and use training.activation_checkpointing.mode: full",
        )


def ranks_share_chunks(context: RuleContext) -> Iterator[Problem]:
    """Ranks that share sequences work on one chunk together, and then on the next."""
    config, parallel = context.config, context.config.parallel
    if config.training.sequence_chunks == 1 or parallel.context == 1:
        return
    for use in context.used:
        heads, about = getattr(use.options, "heads", None), context.kinds[use.kind]
        if about.context == "states":
            yield context.problem(
                KEY,
                "parallel.context",
                "model.layers",
                rule=f"must be 1 with {use.kind} layers where ranks share sequences: these run on one rank after the "
                "other, and a chunk would begin on the first one while the last has not finished the one before",
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
                "parallel.context",
                KEY,
                use.key(".heads"),
                "parallel.context_method",
                rule=f"must divide the {own} query heads of {use.kind} on each rank with sequence_chunks, and "
                "context_method be ulysses: keys of earlier chunks are kept by heads",
                fix=f"use {ranks}context_method: auto, or sequence_chunks: 1",
            )
    if context.zigzag:
        yield context.problem(
            "parallel.context_cut",
            KEY,
            rule="must be contiguous with sequence_chunks: all ranks work on one chunk at a time",
            fix="leave context_cut out",
        )


def chunks_are_recomputed(context: RuleContext) -> Iterator[Problem]:
    training = context.config.training
    if training.sequence_chunks == 1:
        return
    checkpointing = training.activation_checkpointing
    if checkpointing.mode == "selective" or checkpointing.every > 1:
        name = "mode" if checkpointing.mode == "selective" else "every"
        value = "none or full" if name == "mode" else "1"
        yield context.problem(
            f"training.activation_checkpointing.{name}",
            KEY,
            rule=f"must be {value} with sequence_chunks, which keeps a block's input alone and recomputes each chunk",
            fix=f"leave {name} out",
        )
