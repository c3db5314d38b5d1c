"""What sequences that ranks share ask of lengths, heads and layers (`parallel.context`)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..arithmetic.divisors import divisors, multiples, near
from ..problems import Problem
from ..rule_context import RuleContext
from ..sequences import choose_method, kinds_needing_neighbours

FOLDED = "parallel.folded"


def layers_share_sequences(context: RuleContext) -> Iterator[Problem]:
    """With context parallelism a layer has part of a sequence; one that looks beyond a token must ask for the rest.

    ZeRO 3 gathers a layer's parameters from all ranks, of which some wait for a state that the layer makes.
    """
    config = context.config
    if config.parallel.context == 1:
        return
    how = {use.kind: context.kinds[use.kind].context for use in context.used}
    unable, waiting = ([kind for kind, own in how.items() if own == word] for word in ("", "states"))
    if unable:
        able = [name for name, about in context.kinds.items() if about.context]
        yield context.problem(
            "parallel.context",
            "model.layers",
            rule=f"must be 1 with {', '.join(unable)} layers, which need all tokens of a sequence on one rank; layers "
            f"that can share a sequence are {', '.join(able)}",
            fix="use parallel.context=1 and tensor, pipeline or data parallel ranks",
        )
    if waiting and config.zero.stage == 3:
        yield context.problem(
            "zero.stage",
            "parallel.context",
            "model.layers",
            rule=f"must be below 3 where ranks share sequences in {', '.join(waiting)} layers: these run on one rank "
            "after the other, and ZeRO 3 needs all ranks for each layer",
            fix="use zero.stage=2, or parallel.context=1",
        )


def _equal_parts(context: RuleContext) -> tuple[int, int]:
    """What a length must be a multiple of: for the ranks of a sequence, and for its cut besides."""
    parallel = context.config.parallel
    ranks = parallel.context * (parallel.tensor if parallel.sequence else 1)
    return ranks, math.lcm(ranks, 2 * parallel.context) if parallel.context_cut == "zigzag" else ranks


def sequence_divides_over_context_ranks(context: RuleContext) -> Iterator[Problem]:
    parallel, training = context.config.parallel, context.config.training
    length, (unit, of_cut) = training.sequence_length, _equal_parts(context)
    if parallel.context > 1 and training.sequence_chunks == 1 and length % unit:
        also = ("parallel.tensor", "parallel.sequence") if parallel.sequence and parallel.tensor > 1 else ()
        times = " * parallel.tensor" if also else ""
        yield context.problem(
            "training.sequence_length",
            "parallel.context",
            *also,
            rule=f"must be a multiple of parallel.context{times} = {unit}: its ranks have equal parts of a sequence",
            fix=f"use {multiples(length, of_cut)} tokens, or fewer ranks for a sequence",
        )


def context_keys_have_ranks(context: RuleContext) -> Iterator[Problem]:
    """Keys that say how ranks share sequences change something."""
    parallel = context.config.parallel
    for name in ("context_method", "context_cut", "context_ulysses"):
        value = getattr(parallel, name)
        if parallel.context == 1 and context.given(f"parallel.{name}") and value not in ("auto", None):
            yield context.warning(
                f"parallel.{name}",
                "parallel.context",
                rule="must go with ranks that share sequences; alone it has no effect",
                fix=f"use parallel.context of 2 or more, or leave {name} out",
            )
    if parallel.context > 1 and parallel.context_ulysses and parallel.context_method != "nested":
        yield context.problem(
            "parallel.context_ulysses",
            "parallel.context_method",
            rule="must go with context_method nested, where neighbours exchange heads and rings pass keys on",
            fix="use context_method: nested, or leave context_ulysses out",
        )


def context_methods_fit_the_heads(context: RuleContext) -> Iterator[Problem]:
    parallel = context.config.parallel
    if parallel.context == 1 or parallel.context_method not in ("ulysses", "nested"):
        return
    for use in context.used:
        heads = getattr(use.options, "heads", None)
        if context.kinds[use.kind].context != "attends" or not heads or heads % parallel.tensor:
            continue
        own = heads // parallel.tensor
        how = choose_method(parallel.context_method, own, parallel.context, parallel.context_ulysses)
        keys = (use.key(".heads"), *(("parallel.tensor",) if parallel.tensor > 1 else ()))
        if how.name == "ulysses" and own % parallel.context:
            yield context.problem(
                "parallel.context",
                "parallel.context_method",
                *keys,
                rule=f"must divide the {own} query heads of {use.kind} on each rank for ulysses, which gives each rank "
                "some of them",
                fix=f"use parallel.context = {near(parallel.context, divisors(own))}, or context_method: nested, ring",
            )
        both = [each for each in divisors(own) if parallel.context % each == 0]
        if how.name == "nested" and parallel.context_ulysses and how.together not in both:
            yield context.problem(
                "parallel.context_ulysses",
                "parallel.context",
                *keys,
                rule=f"must divide parallel.context = {parallel.context}, and the {own} query heads of {use.kind} on "
                "each rank",
                fix=f"use context_ulysses = {near(how.together, both)}, or leave it out",
            )


def cuts_fit_lengths_and_layers(context: RuleContext) -> Iterator[Problem]:
    config = context.config
    parallel, length = config.parallel, config.training.sequence_length
    if not context.zigzag:
        return
    if names := kinds_needing_neighbours(config):
        yield context.problem(
            "parallel.context_cut",
            "model.layers",
            rule=f"must be contiguous with {', '.join(names)} layers, which go on from the token before",
            fix="leave context_cut out",
        )
    (ranks, of_cut), unit = _equal_parts(context), 2 * parallel.context
    if length % unit and length % ranks == 0:
        yield context.problem(
            "training.sequence_length",
            "parallel.context_cut",
            "parallel.context",
            rule=f"must be a multiple of 2 * parallel.context = {unit} for a zigzag cut: each rank has two equal runs",
            fix=f"use {multiples(length, of_cut)} tokens, or context_cut: contiguous",
        )


def folded_ranks_share_sequences(context: RuleContext) -> Iterator[Problem]:
    """The ranks that share a sequence are those that share rows; what else cuts or gathers matrices has no place."""
    parallel, zero = context.config.parallel, context.config.zero.stage
    if parallel.folded == 1:
        return
    if parallel.context != parallel.folded:
        yield context.problem(
            "parallel.context",
            FOLDED,
            rule=f"must be parallel.folded = {parallel.folded}: the ranks that share sequences share rows of matrices",
            fix="leave context out, or use parallel.folded=1",
        )
    if parallel.tensor > 1:
        yield context.problem(
            "parallel.tensor",
            FOLDED,
            rule="must be 1 with parallel.folded, whose ranks share matrices as tensor parallel ones do",
            fix=f"use parallel.tensor=1 parallel.folded={parallel.tensor * parallel.folded}, or parallel.folded=1",
        )
    if zero == 3:
        yield context.problem(
            "zero.stage",
            FOLDED,
            rule="must be below 3: ZeRO 3 partitions every parameter over all data parallel ranks, and ranks that "
            "share rows have different ones",
            fix="use zero.stage=1 or 2, or parallel.context in place of folded",
        )


def layers_compute_with_rows_that_pass(context: RuleContext) -> Iterator[Problem]:
    config = context.config
    if config.parallel.folded == 1:
        return
    waiting = [use.kind for use in context.used if context.kinds[use.kind].context == "states"]
    if waiting:
        yield context.problem(
            FOLDED,
            "model.layers",
            rule=f"must be 1 with {', '.join(dict.fromkeys(waiting))} layers: these run on one rank after the other, "
            "and rows pass between ranks that compute together",
            fix="use parallel.context",
        )
    if config.training.activation_checkpointing.mode == "selective":
        yield context.problem(
            "training.activation_checkpointing.mode",
            FOLDED,
            rule="must be none or full with parallel.folded: selective keeps products, and those of rows that have "
            "passed would be made again",
            fix="use mode: full",
        )
    vocabulary, ranks = config.model.vocab_size, config.parallel.folded
    if vocabulary and vocabulary % ranks:
        yield context.warning(
            "model.vocab_size",
            FOLDED,
            rule=f"should be a multiple of parallel.folded = {ranks}: embedding and head stay whole on every rank",
            fix=f"use model.vocab_multiple={ranks}",
        )
