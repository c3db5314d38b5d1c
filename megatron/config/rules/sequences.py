"""Lengths of sequences: ranks that share them, chunks of them, and stages of lengths."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..kind import KindUse
from ..problems import Problem, divisors, multiples, near
from ..rule_context import Check, RuleContext, check_order
from ..schema import Config
from ..section import RotaryOptions
from ..sequences import as_stage, choose_method, kinds_needing_neighbours, stages_of
from ..source.structure import nearest

FOLDED = "parallel.folded"


def layers_share_sequences(context: RuleContext) -> Iterator[Problem]:
    """With context parallelism a layer has part of a sequence. A layer that mixes tokens must ask for the rest.

    ZeRO 3 gathers a layer's parameters from all ranks, and some of them wait for a state that the layer makes."""
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
    if waiting and config.parallel.context > 1 and config.parallel.depth > 1:
        yield context.problem(
            "parallel.depth parallel.context model.layers",
            rule=f"must be 1 where ranks share sequences in {waiting} layers: these run on one rank after the other, "
            "and a product gathers its matrix from ranks that compute together",
            fix="use parallel.depth=1, or parallel.context=1",
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


SCHEDULE = ("training", "sequence_schedule")
_LENGTH = "training.sequence_length"


def stages_follow_each_other(context: RuleContext) -> Iterator[Problem]:
    schedule, steps = context.config.training.sequence_schedule, context.config.training.steps
    yield from check_order(context, SCHEDULE, "until", schedule, "end of the stage")
    for number, entry in enumerate(schedule):
        if entry.until >= steps > 0:
            yield context.problem_at(
                (*SCHEDULE, number, "until"),
                "training.steps",
                fatal=False,
                rule=f"must be below training.steps: the run ends before it reaches training.sequence_length = "
                f"{context.config.training.sequence_length}",
                fix=f"use a step below {steps}, or more steps",
            )


def samples_are_cut_into_equal_pieces(context: RuleContext) -> Iterator[Problem]:
    """Each stage's length divides the longest one, and ranks that share a sequence have equal parts of a piece."""
    parallel, longest = context.config.parallel, context.config.training.sequence_length
    ranks = {"parallel.tensor": parallel.tensor if parallel.sequence else 1, "parallel.context": parallel.context}
    others = [name for name, size in ranks.items() if size > 1]
    unit = math.lcm(math.prod(ranks.values()), 2 * parallel.context if context.zigzag else 1)
    legal = [each for each in divisors(longest) if each % unit == 0]
    for number, entry in enumerate(context.config.training.sequence_schedule):
        if entry.sequence_length in legal:
            continue
        parts = f", and be a multiple of {unit}: ranks have equal parts of it" if unit > 1 else ""
        choice = near(entry.sequence_length, legal)
        yield context.problem_at(
            (*SCHEDULE, number, "sequence_length"),
            _LENGTH,
            *others,
            rule=f"must divide {_LENGTH} = {longest}, since samples are cut into equal pieces{parts}",
            fix=f"use {choice} tokens" if choice else "use fewer ranks for a sequence",
        )


def stages_turn_layers_that_turn(context: RuleContext) -> Iterator[Problem]:
    """Rotary options of a stage belong to a kind, or to a variant, of the pattern that has rotary positions."""
    able = {
        f"{use.kind}@{use.variant}" if use.variant else use.kind: use
        for use in context.used
        if isinstance(getattr(use.options, "rotary", None), RotaryOptions) and use.options.position == "rotary"
    }
    kinds = list(dict.fromkeys([*able, *(use.kind for use in able.values())]))
    for number, entry in enumerate(context.config.training.sequence_schedule):
        for name, own in entry.rotary.items():
            path = (*SCHEDULE, number, "rotary", name)
            if name not in kinds:
                yield context.problem_at(
                    path,
                    "model.layers",
                    rule=f"must be a kind with rotary positions, and this model has {', '.join(kinds) or 'none'}",
                    fix=nearest(name, kinds) or "remove it",
                )
            for use in able.values():
                if use.kind == name.partition("@")[0] and getattr(use.options, "mscale_all_dim", None):
                    if own.scaling != use.options.rotary.scaling:
                        yield context.problem_at(
                            (*path, "scaling"),
                            use.key(".mscale_all_dim"),
                            rule="must be the model's, since its scale of attention follows from it (mscale_all_dim)",
                            fix="give the stage the scaling of the model, or use mscale_all_dim: 0",
                        )


def each_stage_keeps_the_rules_of_layers(context: RuleContext) -> Iterator[Problem]:
    """Rules of kinds about lengths and rotary options hold in each stage."""
    if not context.config.training.sequence_schedule or any(samples_are_cut_into_equal_pieces(context)):
        return
    known = {problem.rule for use in context.used for problem in _problems(context, use)}
    for stage in stages_of(context.config)[:-1]:
        at = replace(context, config=as_stage(context.config, stage))
        for use in at.used:
            for problem in _problems(context, use):
                if problem.rule not in known:
                    path = _path(problem.key, stage.number, use.kind, use.variant)
                    yield context.problem_at(path, rule=problem.rule, fix=problem.fix, fatal=problem.fatal)


def _problems(context: RuleContext, use: KindUse[Any]) -> list[Problem]:
    return [problem for rule in context.kinds[use.kind].rules for problem in rule(use)]


def _path(key: str, number: int, kind: str, variant: str | None) -> tuple[str | int, ...]:
    """The place in the schedule of a key of the stage's own configuration."""
    _, found, option = key.partition(".rotary.")
    name = f"{kind}@{variant}" if variant and key.startswith("model.variants.") else kind
    if found:
        return (*SCHEDULE, number, "rotary", name, *option.split("."))
    return (*SCHEDULE, number, "sequence_length")


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
    Check(
        "data.packing training.sequence_schedule",
        lambda c: c.training.sequence_schedule and c.data.packing != "continuous",
        lambda c: (
            f"must be continuous for samples that are cut: {c.data.packing} packs whole documents into "
            f"{c.training.sequence_length} tokens, and shorter stages cut some of these"
        ),
        "use data.packing: continuous, or a run of its own for each length",
        fatal=False,
    ),
)
