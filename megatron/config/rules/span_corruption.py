"""Documents of which spans are taken out: their sentinels exist, and nothing else reorders them."""

from __future__ import annotations

from collections.abc import Iterator

from ..arithmetic.tokenizer_size import local_tokens
from ..problems import Problem
from ..rule_context import RuleContext
from .data import no_tokenizer, sources

RATE, SENTINEL = "data.span_corruption.rate", "data.span_corruption.sentinel"


def corruption_has_documents(context: RuleContext) -> Iterator[Problem]:
    if _corrupts(context) and context.config.data.synthetic != "none":
        yield context.problem(
            RATE,
            "data.synthetic",
            rule="span corruption must have token files: samples that are made have no documents",
            fix=f"give data.train and data.synthetic=none, or {RATE}=0",
        )


def corruption_is_alone(context: RuleContext) -> Iterator[Problem]:
    if _corrupts(context) and context.config.data.fim.rate > 0:
        yield context.problem(
            RATE,
            "data.fim.rate",
            rule="span corruption must not go with fill-in-the-middle: both reorder documents",
            fix=f"use {RATE}=0 or data.fim.rate=0",
        )


def corruption_has_whole_samples(context: RuleContext) -> Iterator[Problem]:
    if _corrupts(context) and context.config.training.sequence_schedule:
        yield context.problem(
            RATE,
            "training.sequence_schedule",
            rule="span corruption must have whole samples: a shorter stage would cut texts from their spans",
            fix=f"use {RATE}=0, or a run of its own for each length",
        )


def a_document_has_room_for_a_span(context: RuleContext) -> Iterator[Problem]:
    if _corrupts(context) and context.config.training.sequence_length < 3:
        yield context.problem(
            "training.sequence_length",
            RATE,
            rule="must be at least 3 with span corruption: two tokens become four",
            fix="use a longer one",
        )


def corruption_has_no_labels(context: RuleContext) -> Iterator[Problem]:
    for path, source in sources(context):
        if _corrupts(context) and source.labels and path[1] in ("train", "phases"):
            yield context.problem_at(
                (*path, "labels"),
                RATE,
                rule="must not go with span corruption, which reorders documents but not their label file",
                fix=f"remove labels, or use {RATE}=0",
            )
        if _corrupts(context) and source.document_weights and path[1] in ("train", "phases"):
            yield context.problem_at(
                (*path, "document_weights"),
                RATE,
                rule="must not go with span corruption, which moves the ends of documents",
                fix=f"remove document_weights (loss_weight may stay), or use {RATE}=0",
            )


def sentinels_are_numbered(context: RuleContext) -> Iterator[Problem]:
    sentinel = context.config.data.span_corruption.sentinel
    if sentinel.count("{}") != 1 or sentinel.replace("{}", "").count("{") + sentinel.replace("{}", "").count("}"):
        yield context.problem(
            SENTINEL,
            rule="must have {} once, for the number of the span, and no other brace",
            fix="write it as in <extra_id_{}>",
        )


def corruption_has_its_tokens(context: RuleContext) -> Iterator[Problem]:
    if _corrupts(context) and no_tokenizer(context):
        yield context.problem(
            RATE,
            "tokenizer.type",
            "tokenizer.path",
            rule="span corruption must have a tokenizer with its sentinels",
            fix=f"give tokenizer.path, or {RATE}=0",
        )


def sentinels_exist(context: RuleContext) -> Iterator[Problem]:
    options = context.config.data.span_corruption
    known = local_tokens(context.config.tokenizer.model_dump()) if _corrupts(context) else None
    if known is None or options.sentinel.count("{}") != 1:
        return
    names = (options.sentinel.replace("{}", str(number)) for number in range(options.sentinels))
    missing = next((number for number, name in enumerate(names) if name not in known), None)
    if missing is not None:
        name = options.sentinel.replace("{}", str(missing))
        yield context.problem(
            SENTINEL,
            "data.span_corruption.sentinels",
            "tokenizer.path",
            rule=f"must be a token of the tokenizer for each span, and it has no token {name!r}",
            fix=f"use sentinels: {missing}" if missing else f"name its sentinels, or train it with --special {name!r}",
        )


def _corrupts(context: RuleContext) -> bool:
    return context.config.data.span_corruption.rate > 0


INPUT_RULES = (corruption_has_its_tokens, sentinels_exist)
