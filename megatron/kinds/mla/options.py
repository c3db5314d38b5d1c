"""Options of the mla mixer, and their rules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from megatron.config.kind import KindUse, LayerKind
from megatron.config.problems import divisors, multiples, near
from megatron.config.section import Derivable, Needed, RotaryOptions, Section, key
from megatron.kinds.attention.options import clipped_logits_are_seen_by_one_rank, heads_divide_over_tensor_ranks
from megatron.kinds.common.options import derived_key, heads_are_given, rotary_scaling_is_complete

if TYPE_CHECKING:
    from megatron.config.derive import View
    from megatron.config.problems import Problem


def yarn_multiplier(factor: float, mscale: float) -> float:
    """DeepSeek's 0.1 mscale ln(factor) + 1. 1 where nothing is stretched."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _scale(own: dict[str, Any], at: View) -> float | None:
    scaling, width = own["rotary"]["scaling"], own["nope_dim"] + own["rope_dim"]
    stretched = scaling["type"] == "yarn" and own["position"] == "rotary"
    return width**-0.5 * (yarn_multiplier(scaling["factor"], own["mscale_all_dim"]) ** 2 if stretched else 1.0)


class MLAOptions(Section):
    heads: Needed[int] = key(None, "Number of heads. Needed where the pattern has an mla layer.", gt=0)
    query_rank: int | None = key(
        None,
        "Channels of the compressed vector of the queries of all heads (q_lora_rank). Without it they read the stream.",
        unit="channels",
        gt=0,
    )
    kv_rank: int = key(
        512,
        "Channels of the compressed vector of keys and values of all heads (kv_lora_rank). Decoding keeps it and "
        "rope_dim more per token.",
        unit="channels",
        gt=0,
    )
    nope_dim: int = key(128, "Channels of a head's queries and keys that positions do not turn.", unit="channels", gt=0)
    rope_dim: int = key(64, "Channels per head that positions turn. All heads share these keys.", unit="channels", gt=0)
    value_dim: int = key(128, "Channels of a head's values.", unit="channels", gt=0)
    position: Literal["rotary", "none"] = key("rotary", "Whether positions turn the rope_dim channels.")
    rotary: RotaryOptions = key(RotaryOptions, "Rotary embedding options, used when position is rotary.")
    mscale_all_dim: float = key(
        0.0, "yarn: the derived scale is multiplied by (0.1 mscale_all_dim ln(factor) + 1) ** 2 (DeepSeek-V3: 1).", ge=0
    )
    scale: Derivable[float] = derived_key(
        "Multiplier of query-key products.",
        "(model.mla.nope_dim + model.mla.rope_dim) ** -0.5, with yarn times what mscale_all_dim says",
        _scale,
        ".nope_dim .rope_dim .position .mscale_all_dim .rotary.scaling.type .rotary.scaling.factor",
    )
    qk_clip: float | None = key(
        None,
        "QK-clip (Kimi K2): if a head's largest logit in a step was above this, its queries and keys shrink. All heads "
        "share the keys with positions, so these stay, and the queries' part for them shrinks twice.",
        gt=0,
    )
    norm_epsilon: float = key(1e-6, "Of the RMSNorms of the two compressed vectors.", gt=0)
    bias: bool = key(False, "Whether the projections to the compressed vectors and the output projection have biases.")
    dropout: float = key(0.0, "Dropout of attention probabilities.", ge=0, lt=1)


def turned_channels_are_pairs(at: KindUse[MLAOptions]) -> Iterator[Problem]:
    own = at.options
    if own.position == "rotary" and own.rope_dim % 2:
        yield at.problem(
            ".rope_dim",
            rule="rotary positions turn pairs of channels: rope_dim must be even",
            fix=f"use {own.rope_dim + 1}, or position: none",
        )


def all_of_rope_dim_is_turned(at: KindUse[MLAOptions]) -> Iterator[Problem]:
    own = at.options
    if own.position == "rotary" and own.rotary.fraction != 1.0:
        yield at.problem(
            ".rotary.fraction .rope_dim",
            rule="rope_dim says which channels are turned, so rotary.fraction must be 1",
            fix="remove fraction, and give the channels in rope_dim and nope_dim",
        )


def columns_share_compressed_vectors(at: KindUse[MLAOptions]) -> Iterator[Problem]:
    columns = at.config.parallel.columns
    for name, rank in (("query_rank", at.options.query_rank), ("kv_rank", at.options.kv_rank)):
        if rank and rank % columns:
            yield at.problem(
                f".{name} parallel.columns",
                rule=f"{name} must be a multiple of parallel.columns = {columns}, which share its channels equally",
                fix=f"use {multiples(rank, columns)}, or parallel.columns = {near(columns, divisors(rank))}",
            )


def _weights(options: MLAOptions, width: int) -> tuple[int, int]:
    if not options.heads:
        return 0, 0
    turned, rank = options.nope_dim + options.rope_dim, options.query_rank
    queries = options.heads * turned * width if rank is None else rank * (width + options.heads * turned)
    compressed = width * (options.kv_rank + options.rope_dim)
    heads = options.heads * (options.kv_rank * (options.nope_dim + options.value_dim) + options.value_dim * width)
    return queries + compressed + heads, 0


KIND = LayerKind(
    role="mixer",
    options=MLAOptions,
    about="Options of the mla mixer: multi-head latent attention (DeepSeek-V2, 2024).",
    layer="megatron.kinds.mla.layer:MLA",
    rules=(
        heads_are_given,
        turned_channels_are_pairs,
        all_of_rope_dim_is_turned,
        rotary_scaling_is_complete,
        heads_divide_over_tensor_ranks,
        clipped_logits_are_seen_by_one_rank,
        columns_share_compressed_vectors,
    ),
    clips_logits=lambda options: options.qk_clip is not None,
    draws=lambda options: options.dropout > 0.0,
    attends=True,
    context="attends",
    columns=True,
    repeats=True,
    head_width=lambda options: options.nope_dim + options.rope_dim,
    linears=lambda options: (
        *(("query_down",) if options.query_rank else ()),
        "query",
        "kv_down",
        "key_value",
        "output",
    ),
    weights=_weights,
)
