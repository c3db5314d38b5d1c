"""The model: a readable pattern, variants that exist, a vocabulary that fits."""

from __future__ import annotations

from collections.abc import Iterator

from ..arithmetic.tokenizer_size import SizeUnknown, tokenizer_size
from ..frozen import thaw
from ..pattern import PatternError
from ..problems import Problem
from ..rule_context import RuleContext
from ..source.structure import nearest
from ..tree import leaves
from .check import Check

RESIDUAL = "model.residual"
LARGEST = 2**31 - 1  # token files and kernels number tokens and channels with 32 bits


def pattern_is_readable(context: RuleContext) -> Iterator[Problem]:
    try:
        _ = context.config.model.blocks
    except PatternError as error:
        rule = f"{error.rule} (column {error.column}: {context.config.model.layers[error.column - 1 :][:24]!r})"
        yield context.problem("model.layers", rule=rule, fix=error.fix)


def variants_exist(context: RuleContext) -> Iterator[Problem]:
    known = context.config.model.variants
    named = dict.fromkeys(each.variant for block in context.blocks for each in block.kinds if each.variant)
    for name in named:
        if name not in known:
            rule = f"the variant {name!r} in the pattern must be defined in model.variants"
            fix = nearest(name, known) or f"add model.variants.{name} with the options that differ"
            yield context.problem("model.layers", rule=rule, fix=fix)
    for name in known:
        if context.blocks and name not in named:
            yield context.problem_at(
                ("model", "variants", name),
                "model.layers",
                fatal=False,
                rule="each variant must be used in the pattern",
                fix=f"write kind@{name} in model.layers, or remove the variant",
            )


def tokenizer_fits_vocabulary(context: RuleContext) -> Iterator[Problem]:
    size = context.config.model.vocab_size
    try:
        ids = tokenizer_size(context.config.tokenizer.model_dump())
    except SizeUnknown:
        return
    if size is not None and ids > size:
        multiple = context.config.model.vocab_multiple
        yield context.problem(
            "model.vocab_size tokenizer.path",
            rule=f"vocab_size must be at least the tokenizer's {ids} ids",
            fix=f"use at least {ids} ({-(-ids // multiple) * multiple} is a multiple of {multiple}), "
            "or remove vocab_size",
        )


def sizes_can_be_counted(context: RuleContext) -> Iterator[Problem]:
    for path, value in leaves(thaw(context.config.model.model_dump())):
        whole = ("model", *path)
        if isinstance(value, int) and value > LARGEST and context.origin(whole).given:
            rule = f"sizes of a model must be at most {LARGEST:,}"
            yield context.problem_at(whole, rule=rule, fix="give a smaller number")


def vocabulary_is_known(context: RuleContext) -> Iterator[Problem]:
    if context.config.model.vocab_size is None:
        try:
            tokenizer_size(context.config.tokenizer.model_dump())
            return  # there is a tokenizer, but it was not asked: its own key is wrong and already reported
        except SizeUnknown as reason:
            yield context.problem(
                "model.vocab_size tokenizer.type tokenizer.path",
                rule=f"the vocabulary size must be known: {reason}",
                fix="give model.vocab_size, or a local tokenizer in tokenizer.path",
            )


CHECKS = (
    Check(
        f"{RESIDUAL}.shared_norm {RESIDUAL}.form",
        lambda c: c.model.residual.shared_norm and c.model.residual.form != "parallel",
        "shared_norm must go with the parallel form: only there one norm feeds both branches",
        "use form: parallel, or shared_norm: false",
    ),
    Check(
        f"{RESIDUAL}.shared_norm {RESIDUAL}.norm",
        lambda c: (
            c.model.residual.shared_norm and c.model.residual.form == "parallel" and c.model.residual.norm != "pre"
        ),
        "shared_norm must go with norm: pre, since a post norm acts on the output of one branch",
        "use norm: pre, or shared_norm: false",
    ),
    Check(
        f"{RESIDUAL}.channel_scales {RESIDUAL}.form",
        lambda c: c.model.residual.channel_scales and c.model.residual.form != "sequential",
        "channel_scales must go with the sequential form: they scale the stream and its one branch",
        "use form: sequential, or channel_scales: false",
    ),
    Check(
        f"{RESIDUAL}.norm {RESIDUAL}.form",
        lambda c: c.model.residual.norm == "sandwich" and c.model.residual.form != "sequential",
        "sandwich must go with the sequential form: it normalises the stream after each branch",
        "use form: sequential, or norm: both",
    ),
    Check(
        "model.embedding.max_positions training.sequence_length",
        lambda c: (
            c.model.embedding.position == "learned"
            and c.model.embedding.max_positions is not None
            and c.model.embedding.max_positions < c.training.sequence_length
        ),
        "max_positions must be at least training.sequence_length",
        lambda c: f"use at least {c.training.sequence_length}, or remove max_positions",
    ),
)
INPUT_RULES = (vocabulary_is_known,)
