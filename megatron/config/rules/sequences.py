"""Lengths, heads and layers of sequences that ranks share (`parallel.context`, `parallel.folded`)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..arithmetic.divisors import divisors, multiples, near
from ..problems import Problem
from ..rule_context import RuleContext
from ..schema import Config
from ..sequences import choose_method, kinds_needing_neighbours
from .check import Check

FOLDED = "parallel.folded"


def layers_share_sequences(context: RuleContext) -> Iterator[Problem]:
    """With context parallelism a layer has part of a sequence. A layer that mixes tokens must ask for the rest.

    ZeRO 3 gathers a layer's parameters from all ranks, and some of them wait for a state that the layer makes.
    """
    config = context.config
    how = {use.kind: context.kinds[use.kind].context for use in context.used}
    unable, waiting = (", ".join(kind for kind, own in how.items() if own == word) for word in ("", "states"))
    if unable and config.parallel.context > 1:
        able = [name for name, about in context.kinds.items() if about.context]
        yield context.problem(
            "parallel.context model.layers",
            rule=f"must be 1 with {unable} layers, which need all tokens of a sequence on one rank. Layers that can "
            f"share a sequence are {', '.join(able)}",
            fix="use parallel.context=1 and tensor, pipeline or data parallel ranks",
        )
    if waiting and config.parallel.context > 1 and config.zero.stage == 3:
        yield context.problem(
            "zero.stage parallel.context model.layers",
            rule=f"must be below 3 where ranks share sequences in {waiting} layers: these run on one rank after the "
            "other, and ZeRO 3 needs all ranks for each layer",
            fix="use zero.stage=2, or parallel.context=1",
        )
    if waiting and config.parallel.folded > 1:
        yield context.problem(
            f"{FOLDED} model.layers",
            rule=f"must be 1 with {waiting} layers: these run on one rank after the other, and rows pass between "
            "ranks that compute together",
            fix="use parallel.context",
        )


def _equal_parts(config: Config) -> tuple[int, int]:
    """The factors that a length must have: for the ranks of a sequence, and for its cut too."""
    parallel = config.parallel
    ranks = parallel.context * (parallel.tensor if parallel.sequence else 1)
    return ranks, math.lcm(ranks, 2 * parallel.context) if parallel.context_cut == "zigzag" else ranks


def sequence_divides_over_context_ranks(context: RuleContext) -> Iterator[Problem]:
    parallel, training = context.config.parallel, context.config.training
    length, (unit, of_cut) = training.sequence_length, _equal_parts(context.config)
    if parallel.context > 1 and training.sequence_chunks == 1 and length % unit:
        also = " parallel.tensor parallel.sequence" if parallel.sequence and parallel.tensor > 1 else ""
        times = " * parallel.tensor" if also else ""
        yield context.problem(
            f"training.sequence_length parallel.context{also}",
            rule=f"must be a multiple of parallel.context{times} = {unit}: its ranks have equal parts of a sequence",
            fix=f"use {multiples(length, of_cut)} tokens, or fewer ranks for a sequence",
        )


def context_keys_have_ranks(context: RuleContext) -> Iterator[Problem]:
    parallel = context.config.parallel
    for name in ("context_method", "context_cut", "context_ulysses"):
        value = getattr(parallel, name)
        if parallel.context == 1 and context.given(f"parallel.{name}") and value not in ("auto", None):
            yield context.warning(
                f"parallel.{name} parallel.context",
                rule="must go with ranks that share sequences, without which it has no effect",
                fix=f"use parallel.context of 2 or more, or remove {name}",
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
                "parallel.context parallel.context_method",
                *keys,
                rule=f"must divide the {own} query heads of {use.kind} on each rank for ulysses, which gives each rank "
                "some of them",
                fix=f"use parallel.context = {near(parallel.context, divisors(own))}, or context_method: nested, ring",
            )
        both = [each for each in divisors(own) if parallel.context % each == 0]
        if how.name == "nested" and parallel.context_ulysses and how.together not in both:
            yield context.problem(
                "parallel.context_ulysses parallel.context",
                *keys,
                rule=f"must divide parallel.context = {parallel.context}, and the {own} query heads of {use.kind} on "
                "each rank",
                fix=f"use context_ulysses = {near(how.together, both)}, or remove it",
            )


def cuts_fit_lengths_and_layers(context: RuleContext) -> Iterator[Problem]:
    config = context.config
    parallel, length = config.parallel, config.training.sequence_length
    if not context.zigzag:
        return
    if names := kinds_needing_neighbours(config):
        rule = f"must be contiguous with {', '.join(names)} layers, which continue from the token before"
        yield context.problem("parallel.context_cut model.layers", rule=rule, fix="remove context_cut")
    (ranks, of_cut), unit = _equal_parts(config), 2 * parallel.context
    if length % unit and length % ranks == 0:
        yield context.problem(
            "training.sequence_length parallel.context_cut parallel.context",
            rule=f"must be a multiple of 2 * parallel.context = {unit} for a zigzag cut: each rank has two equal runs",
            fix=f"use {multiples(length, of_cut)} tokens, or context_cut: contiguous",
        )


CHECKS = (
    Check(
        "parallel.context_ulysses parallel.context_method",
        lambda c: c.parallel.context > 1 and c.parallel.context_ulysses and c.parallel.context_method != "nested",
        "must go with context_method nested, where neighbours exchange heads and rings pass keys on",
        "use context_method: nested, or remove context_ulysses",
    ),
    Check(
        f"parallel.context {FOLDED}",
        lambda c: c.parallel.folded > 1 and c.parallel.context != c.parallel.folded,
        lambda c: f"must be {FOLDED} = {c.parallel.folded}: the ranks that share sequences share rows of matrices",
        f"remove context, or use {FOLDED}=1",
    ),
    Check(
        f"parallel.tensor {FOLDED}",
        lambda c: c.parallel.folded > 1 and c.parallel.tensor > 1,
        f"must be 1 with {FOLDED}, whose ranks share matrices as tensor parallel ones do",
        lambda c: f"use parallel.tensor=1 {FOLDED}={c.parallel.tensor * c.parallel.folded}, or {FOLDED}=1",
    ),
    Check(
        f"zero.stage {FOLDED}",
        lambda c: c.parallel.folded > 1 and c.zero.stage == 3,
        "must be below 3: ZeRO 3 partitions every parameter over all data parallel ranks, and ranks that share rows "
        "have different ones",
        "use zero.stage=1 or 2, or parallel.context in place of folded",
    ),
    Check(
        f"training.activation_checkpointing.mode {FOLDED}",
        lambda c: c.parallel.folded > 1 and c.training.activation_checkpointing.mode == "selective",
        f"must be none or full with {FOLDED}: selective keeps products, and products with rows from other ranks would "
        "be computed again",
        "use mode: full",
    ),
    Check(
        f"model.vocab_size {FOLDED}",
        lambda c: c.parallel.folded > 1 and c.model.vocab_size and c.model.vocab_size % c.parallel.folded,
        lambda c: (
            f"should be a multiple of {FOLDED} = {c.parallel.folded}: embedding and head stay whole on every rank"
        ),
        lambda c: f"use model.vocab_multiple={c.parallel.folded}",
        fatal=False,
    ),
)
