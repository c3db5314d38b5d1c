"""What a model needs to be one: a readable pattern, heads that divide, variants that exist."""

from __future__ import annotations

from collections.abc import Iterator

from ..arithmetic.tokenizer_size import SizeUnknown, tokenizer_size
from ..frozen import thaw
from ..pattern import PatternError
from ..problems import Problem
from ..rule_context import RuleContext
from ..source.structure import nearest
from ..tree import leaves


def pattern_is_readable(context: RuleContext) -> Iterator[Problem]:
    try:
        _ = context.config.model.blocks
    except PatternError as error:
        rule = f"{error.rule} (column {error.column}: {context.config.model.layers[error.column - 1 :][:24]!r})"
        yield context.problem("model.layers", rule=rule, fix=error.fix)


def shared_norm_has_two_branches(context: RuleContext) -> Iterator[Problem]:
    residual = context.config.model.residual
    if residual.shared_norm and residual.form != "parallel":
        yield context.problem(
            "model.residual.shared_norm",
            "model.residual.form",
            rule="shared_norm must go with the parallel form: only there one norm feeds both branches",
            fix="use form: parallel, or shared_norm: false",
        )
    elif residual.shared_norm and residual.norm != "pre":
        yield context.problem(
            "model.residual.shared_norm",
            "model.residual.norm",
            rule="shared_norm must go with norm: pre: a post norm acts on the output of one branch",
            fix="use norm: pre, or shared_norm: false",
        )


def channel_scales_join_one_branch(context: RuleContext) -> Iterator[Problem]:
    residual = context.config.model.residual
    if residual.channel_scales and residual.form != "sequential":
        yield context.problem(
            "model.residual.channel_scales",
            "model.residual.form",
            rule="channel_scales must go with the sequential form: they scale the stream and its one branch",
            fix="use form: sequential, or channel_scales: false",
        )


def learned_positions_cover_the_sequence(context: RuleContext) -> Iterator[Problem]:
    embedding, length = context.config.model.embedding, context.config.training.sequence_length
    if embedding.position == "learned" and embedding.max_positions is not None and embedding.max_positions < length:
        yield context.problem(
            "model.embedding.max_positions",
            "training.sequence_length",
            rule="max_positions must be at least training.sequence_length",
            fix=f"use at least {length}, or leave max_positions out",
        )


def variants_exist(context: RuleContext) -> Iterator[Problem]:
    known = context.config.model.variants
    named = dict.fromkeys(each.variant for block in context.blocks for each in block.kinds if each.variant)
    for name in named:
        if name not in known:
            fix = nearest(name, known) or f"add model.variants.{name} with the options that differ"
            yield context.problem(
                "model.layers", rule=f"the variant {name!r} in the pattern must be defined in model.variants", fix=fix
            )
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
            "model.vocab_size",
            "tokenizer.path",
            rule=f"vocab_size must be at least the tokenizer's {ids} ids",
            fix=f"use at least {ids} ({-(-ids // multiple) * multiple} is a multiple of {multiple}), "
            "or leave vocab_size out",
        )


LARGEST = 2**31 - 1


def sizes_can_be_counted(context: RuleContext) -> Iterator[Problem]:
    """Token files and kernels number tokens and channels with 32 bits."""
    for path, value in leaves(thaw(context.config.model.model_dump())):
        whole = ("model", *path)
        if isinstance(value, int) and value > LARGEST and context.origin(whole).given:
            yield context.problem_at(
                whole, rule=f"sizes of a model must be at most {LARGEST:,}", fix="give a smaller number"
            )


def sandwich_joins_one_branch(context: RuleContext) -> Iterator[Problem]:
    residual = context.config.model.residual
    if residual.norm == "sandwich" and residual.form != "sequential":
        yield context.problem(
            "model.residual.norm",
            "model.residual.form",
            rule="sandwich must go with the sequential form: it normalises the stream after each branch",
            fix="use form: sequential, or norm: both",
        )


def vocabulary_is_known(context: RuleContext) -> Iterator[Problem]:
    if context.config.model.vocab_size is None:
        try:
            tokenizer_size(context.config.tokenizer.model_dump())
            return  # a tokenizer that is there but was not asked: its own key is wrong and already reported
        except SizeUnknown as reason:
            yield context.problem(
                "model.vocab_size",
                "tokenizer.type",
                "tokenizer.path",
                rule=f"the vocabulary size must be known: {reason}",
                fix="give model.vocab_size, or a local tokenizer in tokenizer.path",
            )


INPUT_RULES = (vocabulary_is_known,)
