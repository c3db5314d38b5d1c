"""ZAYA1: compressed convolutional attention and experts in every layer, routers that hand on a state, scaled
residuals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from megatron.config.sections.model import ModelSection
from megatron.config.variants import options_of
from megatron.kinds.cca import hf as cca
from megatron.kinds.common.links import Link
from megatron.kinds.moe import hf as moe

from ..architecture import Architecture, Field
from ..layers import Layers
from ..parts import Found
from ..rope import rope_parameters, rope_values
from .common import EMBEDDING, FINAL_NORM, HEAD, OURS, THEIRS, activation

_FULL, _SLIDING = "hybrid", "hybrid_sliding"
_SCALES = {
    "branch_scale": "hidden_states_scale",
    "branch_shift": "hidden_states_bias",
    "stream_scale": "residual_scale",
    "stream_shift": "residual_bias",
}


def _scales(ours: str, theirs: str) -> tuple[Link, ...]:
    """Factors and shifts of a residual merge."""
    return tuple(
        Link(f"{OURS}.{ours}.{mine}", f"{THEIRS}.{theirs}.{each}", suffixes=("",)) for mine, each in _SCALES.items()
    )


_LINKS = (
    EMBEDDING,
    Link("embedding.scale", "model.input_hidden_states_scale", suffixes=("",)),
    Link("embedding.shift", "model.input_hidden_states_bias", suffixes=("",)),
    Link(f"{OURS}.mixer_norm", f"{THEIRS}.input_layernorm"),
    *cca.mixer(f"{THEIRS}.self_attn"),
    *_scales("mixer_joint", "post_attention_residual_scale"),
    Link(f"{OURS}.ffn_norm", f"{THEIRS}.post_attention_layernorm"),
    *moe.network_router(f"{THEIRS}.mlp.gate"),
    *moe.experts_as_one(f"{THEIRS}.mlp.experts"),
    *_scales("ffn_joint", "post_mlp_residual_scale"),
    FINAL_NORM,
    HEAD,
)

_FIELDS = {  # ours -> theirs
    "hidden_size": "hidden_size",
    "vocab_size": "vocab_size",
    "embedding.tied": "tie_word_embeddings",
    "head.bias": "lm_head_bias",
    "norm.epsilon": "rms_norm_eps",
    "cca.heads": "num_attention_heads",
    "cca.kv_heads": "num_key_value_heads",
    "cca.head_dim": "head_dim",
    "cca.qkv_bias": "attention_bias",
    "cca.output_bias": "attention_bias",
    "cca.depthwise": "cca_time0",
    "cca.grouped": "cca_time1",
    "moe.experts": "num_experts",
    "moe.top_k": "num_experts_per_tok",
    "moe.hidden_size": "moe_intermediate_size",
    "moe.router.width": "router_hidden_size",
}
_FIXED = {
    "norm.type": "rmsnorm",
    "residual.form": "sequential",
    "residual.norm": "pre",
    "residual.channel_scales": True,
    "embedding.position": "none",
    "cca.position": "rotary",
    "cca.temperature": "linear",
    "moe.gated": True,
    "moe.shared_size": 0,
    "moe.capacity_factor": None,
    "moe.router.network": "mlp",
    "moe.router.skip": True,
    "moe.router.score": "softmax",
    "moe.router.select": "top_k",
    "moe.router.normalize": False,
    "moe.router.scale": 1.0,
    "moe.router.groups": 1,
    "moe.router.correction": "sign",
}


@dataclass(frozen=True)
class _Zaya(Layers):
    """The first layer's router has no state before it; some layers may have a window, and rotary options of
    their own.
    """

    def pattern(self, theirs: PreTrainedConfig) -> str:
        mixers = ["cca@sliding" if each == _SLIDING else "cca" for each in theirs.layer_types]
        if len(set(mixers)) == 1 and len(mixers) > 1:
            return f"{mixers[0]}/moe@first ({mixers[0]}/moe) x{len(mixers) - 1}"
        return " ".join(f"{mixer}/moe{'' if number else '@first'}" for number, mixer in enumerate(mixers))


def _values(theirs: PreTrainedConfig) -> Found:
    """Its stream is always fp32, for which it has no option."""
    rotary, problems = rope_values(theirs.rope_parameters[_FULL], partial=True)
    variants: dict[str, Any] = {"first": {"router": {"average": False}}}
    if _SLIDING in theirs.layer_types:
        near, found = rope_values(theirs.rope_parameters[_SLIDING], partial=True)
        variants["sliding"] = {"window": theirs.sliding_window, "rotary": near}
        problems += found
    return {"cca.rotary": rotary, "variants": variants, "residual.fp32": True}, problems


def _settings(model: ModelSection, kinds: list[str]) -> dict[str, Any]:
    mixers = [options_of(model, block.mixer) for block in model.blocks if block.mixer is not None]
    kinds = [_FULL if each.window is None else _SLIDING for each in mixers]
    rotary = {kind: each.rotary for kind, each in zip(reversed(kinds), reversed(mixers))}
    ropes = {kind: rope_parameters(rotary.get(kind, model.cca.rotary), partial=True) for kind in (_FULL, _SLIDING)}
    windows = sorted({each.window for each in mixers if each.window is not None})
    return {"layer_types": kinds, "rope_parameters": ropes, "sliding_window": windows[0] if windows else None}


ZAYA = Architecture(
    "zaya",
    "ZayaForCausalLM",
    _LINKS,
    _Zaya({"cca/moe": _FULL}, _values, _settings),
    fields=(*(Field(ours, theirs) for ours, theirs in _FIELDS.items()), activation("hidden_act", "moe")),
    fixed=_FIXED,
    newer=lambda model: "version 4 does not have the class",
)
