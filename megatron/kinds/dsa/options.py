"""Options of the dsa mixer, and their rules."""

from collections.abc import Iterator
from dataclasses import replace

from megatron.config.kind import KindUse
from megatron.config.problems import Problem
from megatron.config.section import key
from megatron.kinds.mla.options import KIND as MLA
from megatron.kinds.mla.options import MLAOptions


class DSAOptions(MLAOptions):
    index_heads: int = key(64, "Heads of the indexer.", gt=0)
    index_dim: int = key(128, "Channels of the indexer's queries and keys.", unit="channels", gt=0)
    index_top_k: int = key(2048, "Earlier tokens that a token attends to: those with the largest scores.", gt=0)
    index_loss: float = key(
        1.0,
        "Coefficient of the indexer's loss: the divergence of attention's probabilities, summed over heads, from the "
        "softmax of the scores. Only the indexer gets its gradient. 0: the indexer does not learn.",
        ge=0,
    )
    warm_up: bool = key(
        False, "Attention reads all tokens, and the indexer learns from all of them, before sparse training."
    )


def indexer_turns_channels(at: KindUse[DSAOptions]) -> Iterator[Problem]:
    own = at.options
    if own.index_dim < own.rope_dim and own.position == "rotary":
        yield at.problem(
            ".index_dim .rope_dim",
            rule=f"the indexer turns rope_dim channels: index_dim must be at least {own.rope_dim}",
            fix=f"use index_dim: {own.rope_dim}",
        )


def probabilities_are_whole(at: KindUse[DSAOptions]) -> Iterator[Problem]:
    if at.options.dropout:
        yield at.problem(
            ".dropout",
            rule="must be 0: the indexer learns the probabilities of attention",
            fix="remove it, or use the kind mla",
        )
    if at.options.qk_clip is not None:
        yield at.problem(
            ".qk_clip", rule="must be null: logits of tokens that are not chosen do not count", fix="use the kind mla"
        )


KIND = replace(
    MLA,
    options=DSAOptions,
    about="Options of the dsa mixer: latent attention to the tokens that an indexer chooses (DeepSeek-V3.2, 2025).",
    layer="megatron.kinds.dsa.layer:DSA",
    rules=(*MLA.rules, indexer_turns_channels, probabilities_are_whole),
    clips_logits=lambda options: False,
    draws=lambda options: False,
    context="",
    columns=False,
    repeats=False,
    weights=lambda options, width: (
        MLA.weights(options, width)[0]
        + options.index_heads * ((options.query_rank or width) * options.index_dim + width)
        + width * options.index_dim,
        0,
    ),
)
