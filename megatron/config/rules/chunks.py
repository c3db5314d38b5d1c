"""What layers that work on a sequence in chunks ask of lengths and layers (`training.sequence_chunks`)."""

from __future__ import annotations

from collections.abc import Iterator

from ..divisors import multiples
from ..problems import Problem
from ..rule_context import RuleContext

KEY = "training.sequence_chunks"


def chunks_are_equal(context: RuleContext) -> Iterator[Problem]:
    training, parallel = context.config.training, context.config.parallel
    unit = training.sequence_chunks * (parallel.tensor if parallel.sequence else 1)
    if training.sequence_chunks > 1 and training.sequence_length % unit:
        also = ("parallel.tensor", "parallel.sequence") if parallel.sequence and parallel.tensor > 1 else ()
        times = " * parallel.tensor" if also else ""
        yield context.problem(
            "training.sequence_length",
            KEY,
            *also,
            rule=f"must be a multiple of training.sequence_chunks{times} = {unit}: chunks have equally many tokens",
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
    if config.parallel.context > 1:
        yield context.problem(
            KEY,
            "parallel.context",
            rule="must be 1 where ranks share sequences: each has one part of a sequence, and no part of each chunk",
            fix="use one of both",
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
    if training.compile == "layer":
        yield context.problem(
            "training.compile",
            KEY,
            rule="must not be layer with sequence_chunks: each chunk's attention has other keys, and would be compiled "
            "anew",
            fix="use compile: auto",
        )


RULES = (chunks_are_equal, layers_go_on_from_chunks, chunks_are_recomputed)
