"""ZAYA1: compressed convolutional attention and experts in every layer, routers that hand on a state, scaled
residuals.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from megatron.config.sections.model import ModelSection
from megatron.config.variants import options_of

from .hybrids import Hybrid
from .links import Fused, Joined, Link
from .rope import rope_parameters, rope_values

_OURS, _THEIRS = "layers.{n}", "model.layers.{n}"
_FULL, _SLIDING = "hybrid", "hybrid_sliding"


def _whole(ours: str, theirs: str) -> Link:
    """One tensor that has a name of its own on both sides."""
    return Link(f"{_OURS}.{ours}", f"{_THEIRS}.{theirs}", suffixes=("",))


_JOINTS = {
    "branch_scale": "hidden_states_scale",
    "branch_shift": "hidden_states_bias",
    "stream_scale": "residual_scale",
    "stream_shift": "residual_bias",
}
_PROJECTION, _GATE = f"{_THEIRS}.self_attn.qkv_proj", f"{_THEIRS}.mlp.gate"

LINKS = (
    Link("embedding.tokens", "model.embed_tokens"),
    Link("embedding.scale", "model.input_hidden_states_scale", suffixes=("",)),
    Link("embedding.shift", "model.input_hidden_states_bias", suffixes=("",)),
    Link(f"{_OURS}.mixer_norm", f"{_THEIRS}.input_layernorm"),
    Link(f"{_OURS}.cca.query_key", (f"{_PROJECTION}.q_proj", f"{_PROJECTION}.k_proj"), Joined()),
    Link(f"{_OURS}.cca.value", (f"{_PROJECTION}.v_proj_current", f"{_PROJECTION}.v_proj_delayed"), Fused()),
    Link(f"{_OURS}.cca.depthwise", f"{_PROJECTION}.conv_qk_depthwise"),
    Link(f"{_OURS}.cca.grouped", f"{_PROJECTION}.conv_qk_grouped"),
    _whole("cca.temperature", "self_attn.qk_norm.temp"),
    Link(f"{_OURS}.cca.output", f"{_THEIRS}.self_attn.o_proj"),
    *(_whole(f"mixer_joint.{ours}", f"post_attention_residual_scale.{theirs}") for ours, theirs in _JOINTS.items()),
    Link(f"{_OURS}.ffn_norm", f"{_THEIRS}.post_attention_layernorm"),
    Link(f"{_OURS}.moe.router.down", f"{_GATE}.down_proj"),
    _whole("moe.router.state_scale", "mlp.gate.router_states_scale"),
    *(Link(f"{_OURS}.moe.router.{each}", f"{_GATE}.router_mlp.{each}") for each in ("norm", "fc1", "fc2")),
    Link(f"{_OURS}.moe.router.out", f"{_GATE}.router_mlp.out_proj"),
    _whole("moe.router.correction", "mlp.gate.balancing_biases"),
    _whole("moe.experts.gate_up.weight", "mlp.experts.gate_up_proj"),
    _whole("moe.experts.down.weight", "mlp.experts.down_proj"),
    *(_whole(f"ffn_joint.{ours}", f"post_mlp_residual_scale.{theirs}") for ours, theirs in _JOINTS.items()),
    Link("final_norm", "model.norm"),
    Link("head", "lm_head"),
)

FIELDS = {  # ours -> theirs
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
FIXED = {
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


class _Zaya(Hybrid):
    """The first layer's router has no state before it; some layers may have a window, and rotary options of
    their own.
    """

    def pattern(self, theirs: PreTrainedConfig) -> str:
        mixers = ["cca@sliding" if each == _SLIDING else "cca" for each in theirs.layer_types]
        if len(set(mixers)) == 1 and len(mixers) > 1:
            return f"{mixers[0]}/moe@first ({mixers[0]}/moe) x{len(mixers) - 1}"
        return " ".join(f"{mixer}/moe{'' if number else '@first'}" for number, mixer in enumerate(mixers))


def _values(theirs: PreTrainedConfig) -> tuple[dict[str, Any], list[str]]:
    rotary, problems = rope_values(theirs.rope_parameters[_FULL], partial=True)
    variants: dict[str, Any] = {"first": {"router": {"average": False}}}
    if _SLIDING in theirs.layer_types:
        near, found = rope_values(theirs.rope_parameters[_SLIDING], partial=True)
        variants["sliding"] = {"window": theirs.sliding_window, "rotary": near}
        problems += found
    return {"cca.rotary": rotary, "variants": variants}, problems


def _settings(model: ModelSection, kinds: list[str]) -> dict[str, Any]:
    mixers = [options_of(model, block.mixer) for block in model.blocks]
    kinds = [_FULL if each.window is None else _SLIDING for each in mixers]
    rotary = {kind: each.rotary for kind, each in zip(reversed(kinds), reversed(mixers))}
    ropes = {kind: rope_parameters(rotary.get(kind, model.cca.rotary), partial=True) for kind in (_FULL, _SLIDING)}
    windows = sorted({each.window for each in mixers if each.window is not None})
    return {"layer_types": kinds, "rope_parameters": ropes, "sliding_window": windows[0] if windows else None}


HYBRID = _Zaya({"cca/moe": _FULL}, _values, _settings)
