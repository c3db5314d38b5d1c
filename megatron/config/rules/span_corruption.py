"""Span corruption: sentinels exist, and nothing else reorders documents."""

from __future__ import annotations

from collections.abc import Iterator

from ..arithmetic.tokenizer_size import local_tokens
from ..problems import Problem
from ..rule_context import RuleContext
from ..schema import Config
from .check import Check

RATE, SENTINEL = "data.span_corruption.rate", "data.span_corruption.sentinel"


def _corrupts(config: Config) -> bool:
    return config.data.span_corruption.rate > 0


def sentinels_exist(context: RuleContext) -> Iterator[Problem]:
    options = context.config.data.span_corruption
    known = local_tokens(context.config.tokenizer.model_dump()) if _corrupts(context.config) else None
    if known is None or options.sentinel.count("{}") != 1:
        return
    names = (options.sentinel.replace("{}", str(number)) for number in range(options.sentinels))
    missing = next((number for number, name in enumerate(names) if name not in known), None)
    if missing is not None:
        name = options.sentinel.replace("{}", str(missing))
        yield context.problem(
            f"{SENTINEL} data.span_corruption.sentinels tokenizer.path",
            rule=f"must be a token of the tokenizer for each span, and it has no token {name!r}",
            fix=f"use sentinels: {missing}" if missing else f"name its sentinels, or train it with --special {name!r}",
        )


def _has_other_braces(config: Config) -> bool:
    sentinel = config.data.span_corruption.sentinel
    return sentinel.count("{}") != 1 or bool(set("{}") & set(sentinel.replace("{}", "")))


CHECKS = (
    Check(
        f"{RATE} data.synthetic",
        lambda c: _corrupts(c) and c.data.synthetic != "none",
        "span corruption must have token files: synthetic samples have no documents",
        f"give data.train and data.synthetic=none, or {RATE}=0",
    ),
    Check(
        f"{RATE} data.fim.rate",
        lambda c: _corrupts(c) and c.data.fim.rate > 0,
        "span corruption must not go with fill-in-the-middle: both reorder documents",
        f"use {RATE}=0 or data.fim.rate=0",
    ),
    Check(
        f"{RATE} training.sequence_schedule",
        lambda c: _corrupts(c) and c.training.sequence_schedule,
        "span corruption must have whole samples: a shorter stage would cut texts from their spans",
        f"use {RATE}=0, or a run of its own for each length",
    ),
    Check(
        f"training.sequence_length {RATE}",
        lambda c: _corrupts(c) and c.training.sequence_length < 3,
        "must be at least 3 with span corruption: two tokens become four",
        "use a longer one",
    ),
    Check(
        SENTINEL,
        _has_other_braces,
        "must have {} once, for the number of the span, and no other brace",
        "write it as in <extra_id_{}>",
    ),
)
INPUT_RULES = (sentinels_exist,)
