"""ZAYA1: compressed convolutional attention, experts with routers that pass on a state, and scaled residuals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from megatron.config.sections.model import ModelSection
from megatron.kinds.cca import hf as cca
from megatron.kinds.common.links import Link
from megatron.kinds.moe import hf as moe

from ..architecture import Architecture, Field
from ..layer_types import mixers_of, window_settings
from ..layers import Layers
from ..parts import Found
from ..rope import rope_parameters, rope_values
from . import common

_FULL, _SLIDING = "hybrid", "hybrid_sliding"
_SCALES = {
    "branch_scale": "hidden_states_scale",
    "branch_shift": "hidden_states_bias",
    "stream_scale": "residual_scale",
    "stream_shift": "residual_bias",
}


def _scales(ours: str, theirs: str) -> tuple[Link, ...]:
    return tuple(
        Link(f"{common.OURS}.{ours}.{mine}", f"{common.THEIRS}.{theirs}.{each}", suffixes=("",))
        for mine, each in _SCALES.items()
    )


_LINKS = (
    common.EMBEDDING,
    Link("embedding.scale", "model.input_hidden_states_scale", suffixes=("",)),
    Link("embedding.shift", "model.input_hidden_states_bias", suffixes=("",)),
    Link(f"{common.OURS}.mixer_norm", f"{common.THEIRS}.input_layernorm"),
    *cca.mixer(f"{common.THEIRS}.self_attn"),
    *_scales("mixer_joint", "post_attention_residual_scale"),
    Link(f"{common.OURS}.ffn_norm", f"{common.THEIRS}.post_attention_layernorm"),
    *moe.network_router(f"{common.THEIRS}.mlp.gate"),
    *moe.experts_as_one(f"{common.THEIRS}.mlp.experts"),
    *_scales("ffn_joint", "post_mlp_residual_scale"),
    common.FINAL_NORM,
    common.HEAD,
)

_FIELDS = (
    *(
        *common.STREAM,
        common.TIED,
        common.rms_norm(),
        Field("head.bias", "lm_head_bias"),
        common.activation("hidden_act", "moe"),
    ),
    *common.fields("cca", heads="num_attention_heads", kv_heads="num_key_value_heads", head_dim="head_dim"),
    *common.fields(
        "cca", qkv_bias="attention_bias", output_bias="attention_bias", depthwise="cca_time0", grouped="cca_time1"
    ),
    *common.fields("moe", experts="num_experts", top_k="num_experts_per_tok", hidden_size="moe_intermediate_size"),
    Field("moe.router.width", "router_hidden_size"),
)
_FIXED = {
    **{**common.BARE, **common.options("residual", form="sequential", channel_scales=True)},
    **common.options("cca", position="rotary", temperature="linear"),
    **{**common.EXPERTS_FIXED, "moe.shared_size": 0},
    **common.options("moe.router", network="mlp", skip=True, normalize=False, scale=1.0, groups=1, correction="sign"),
}
del _FIXED["moe.router.bias"]


@dataclass(frozen=True)
class _Zaya(Layers):
    """The first layer's router has no previous state. Layers with a window have their own rotary options."""

    def pattern(self, theirs: PreTrainedConfig) -> str:
        mixers = ["cca@sliding" if each == _SLIDING else "cca" for each in theirs.layer_types]
        if len(set(mixers)) == 1 and len(mixers) > 1:
            return f"{mixers[0]}/moe@first ({mixers[0]}/moe) x{len(mixers) - 1}"
        return " ".join(f"{mixer}/moe{'' if number else '@first'}" for number, mixer in enumerate(mixers))


def _values(theirs: PreTrainedConfig) -> Found:
    """Its stream is always fp32, without an option."""
    rotary, problems = rope_values(theirs.rope_parameters[_FULL], partial=True)
    variants: dict[str, Any] = {"first": {"router": {"average": False}}}
    if _SLIDING in theirs.layer_types:
        near, found = rope_values(theirs.rope_parameters[_SLIDING], partial=True)
        variants["sliding"] = {"window": theirs.sliding_window, "rotary": near}
        problems += found
    return {"cca.rotary": rotary, "variants": variants, "residual.fp32": True}, problems


def _settings(model: ModelSection, kinds: list[str]) -> dict[str, Any]:
    mixers = mixers_of(model)
    kinds = [_FULL if each.window is None else _SLIDING for each in mixers]
    rotary = {kind: each.rotary for kind, each in zip(reversed(kinds), reversed(mixers))}
    ropes = {kind: rope_parameters(rotary.get(kind, model.cca.rotary), partial=True) for kind in (_FULL, _SLIDING)}
    return {**window_settings(mixers), "layer_types": kinds, "rope_parameters": ropes}


ZAYA = Architecture(
    "zaya",
    "ZayaForCausalLM",
    _LINKS,
    _Zaya({"cca/moe": _FULL}, _values, _settings),
    fields=_FIELDS,
    fixed=_FIXED,
    newer=lambda model: "version 4 does not have the class",
)
