"""Prediction of tokens further ahead than the next one (DeepSeek-V3, arXiv 2412.19437, section 2.2): keys and rules.

Each module is one block, of layers that need no other layers' results. `megatron/model/multi_token.py` builds the
modules, and the stack imports it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron.config.features.feature import Feature, Keys, Message
from megatron.config.pattern import PatternError, blocks_of
from megatron.config.section import Derivable, Derived, Section, key

if TYPE_CHECKING:
    from megatron.config.problems import Problem
    from megatron.config.rule_context import RuleContext

SECTION = "model.multi_token_prediction"
DEPTH, BLOCK = f"{SECTION}.depth", f"{SECTION}.block"


def _block(own: dict[str, Any], at: Any) -> str | None:
    return str(replace(at.blocks[-1], recurrent=False)) if own["depth"] and at.blocks else None


class MultiTokenOptions(Section):
    depth: int = key(
        0,
        "Number of modules after the stack. Each predicts one token further ahead than the one before it. 0 predicts "
        "only the next token. The modules are trained and saved, and skipped in evaluation and generation.",
        unit="tokens",
        ge=0,
        le=16,
    )
    loss_weight: float = key(0.3, "The modules' mean loss, times this, is added to the next token's loss.", ge=0)
    block: Derivable[str] = key(
        None,
        "The block of each module, as in model.layers and of kinds that it has too.",
        derived=Derived("the last block of model.layers", _block, ("model.layers", ".depth")),
    )


class MultiTokenKeys(Section):
    multi_token_prediction: MultiTokenOptions = key(
        MultiTokenOptions, "Modules that predict tokens further ahead than the next one, in training."
    )


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
            rule="must be one block, without side layers and not repeated: each module has one",
            fix="use a mixer and a feed-forward, as in attention/mlp",
        )


def block_can_stand_alone(context: RuleContext) -> Iterator[Problem]:
    """It has the options of the stack's layers, and its stream has none of their channels."""
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
                rule=f"must only have layers that model.layers has too, unlike {name}",
                fix="use the kinds and variants of the stack",
            )
            continue
        kind = context.kinds[each.name]
        if not kind.repeats and not any(kind.experts(use.options) for use in context.layers(each.name)):
            able = ", ".join(sorted(name for name, kind in context.kinds.items() if kind.repeats))
            yield context.problem(
                BLOCK,
                "model.layers",
                rule=f"must have layers that only read the stream, and {each.name} reads more, or depends on its place "
                "in the stack",
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
            fix="remove sequence_chunks, and use training.activation_checkpointing.mode: full",
        )


def _traffic(config: Any) -> tuple[Message, ...]:
    elements = 2 * config.model.multi_token_prediction.depth
    return tuple(Message("exchange", axis, "all_reduce", "fp64", elements) for axis in ("replicas", "pipeline"))


FEATURE = Feature(
    about="Losses of further tokens.",
    wanted=lambda config: config.model.multi_token_prediction.depth > 0,
    keys=(Keys("model", MultiTokenKeys, after="recurrence"),),
    rules=(block_is_one, block_can_stand_alone, there_are_tokens_to_predict),
    engine="megatron.features.multi_token.part:FurtherLosses",
    before=("teacher", "recurrent_depth", "logit_clipping"),
    traffic=_traffic,
)
