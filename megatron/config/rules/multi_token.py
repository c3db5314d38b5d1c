"""Modules that predict further tokens: one block each, of layers that need nothing of those before them."""

from __future__ import annotations

from collections.abc import Iterator

from ..pattern import PatternError, blocks_of
from ..problems import Problem
from ..rule_context import RuleContext

SECTION = "model.multi_token_prediction"
DEPTH, BLOCK = f"{SECTION}.depth", f"{SECTION}.block"


def block_is_one(context: RuleContext) -> Iterator[Problem]:
    model = context.config.model
    text = model.multi_token_prediction.block
    if text is None or not model.multi_token_prediction.depth:
        return
    try:
        blocks = blocks_of(text, tuple(model.extensions))
    except PatternError as error:
        yield context.problem(BLOCK, rule=f"must be a block: {error.rule} (column {error.column})", fix=error.fix)
        return
    if len(blocks) > 1 or blocks[0].recurrent or blocks[0].side:
        yield context.problem(
            BLOCK,
            rule="must be one block, without layers beside it and not repeated: each module has one",
            fix="use a mixer and a feed-forward, as in attention/mlp",
        )


def block_can_stand_alone(context: RuleContext) -> Iterator[Problem]:
    """Its options are those of the stack's layers, and the stream that it reads has no channels of theirs."""
    block = context.further_block
    if block is None or not context.blocks:
        return
    known = {(each.name, each.variant) for other in context.blocks for each in other.kinds}
    for each in block.kinds:
        name = each.name if each.variant is None else f"{each.name}@{each.variant}"
        if (each.name, each.variant) not in known:
            yield context.problem(
                BLOCK,
                "model.layers",
                rule=f"must be made of layers that model.layers has too, and {name} is none of them",
                fix="use the kinds and variants of the stack",
            )
            continue
        kind = context.kinds[each.name]
        if not kind.repeats and not any(kind.experts(use.options) for use in context.layers(each.name)):
            able = ", ".join(sorted(name for name, kind in context.kinds.items() if kind.repeats))
            yield context.problem(
                BLOCK,
                "model.layers",
                rule=f"must be of layers that take nothing from others but the stream, and {each.name} does, or it "
                "depends on its place in the stack",
                fix=f"use one of {able} and moe, and have such a layer in model.layers",
            )


def there_are_tokens_to_predict(context: RuleContext) -> Iterator[Problem]:
    depth, training = context.config.model.multi_token_prediction.depth, context.config.training
    if depth and depth >= training.sequence_length:
        yield context.problem(
            DEPTH,
            "training.sequence_length",
            rule="must be less than training.sequence_length: the last module would have no token to predict",
            fix=f"use at most {training.sequence_length - 1}",
        )
    if depth and training.sequence_chunks > 1:
        yield context.problem(
            DEPTH,
            "training.sequence_chunks",
            rule="must be 0 with training.sequence_chunks: a module reads tokens of the chunk behind its own",
            fix="leave sequence_chunks out, and use training.activation_checkpointing.mode: full",
        )


RULES = (block_is_one, block_can_stand_alone, there_are_tokens_to_predict)
