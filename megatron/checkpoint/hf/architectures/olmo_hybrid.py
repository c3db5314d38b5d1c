"""OLMo Hybrid: Gated DeltaNet or attention, each with an MLP."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from transformers import PreTrainedConfig

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.links import Link
from megatron.kinds.gated_delta import hf as gated_delta

from ..architecture import Architecture
from ..layers import Layers, numbers_of
from ..parts import Found
from ..rope import rope_parameters, rope_values
from .common import ATTENTION_BIASES, LLAMA_COMMON, LLAMA_FIXED, LLAMA_SIZES, QK_NORMS, fields

_KIND = "gated_delta"
_OPTIONS = (
    *fields(_KIND, heads="linear_num_value_heads", key_heads="linear_num_key_heads", key_dim="linear_key_head_dim"),
    *fields(_KIND, value_dim="linear_value_head_dim", convolution="linear_conv_kernel_dim"),
    *fields(_KIND, negative_eigenvalues="linear_allow_neg_eigval"),
    *fields(_KIND, decay_low="linear_a_log_min", decay_high="linear_a_log_max"),
    *fields(_KIND, time_step_low="linear_dt_min", time_step_high="linear_dt_max"),
    *fields(_KIND, time_step_floor="linear_dt_init_floor"),
)


def _values(theirs: PreTrainedConfig) -> Found:
    parameters = theirs.rope_parameters or {}
    if parameters.get("rope_theta") is None:
        return {"attention.position": "none"}, []
    rotary, problems = rope_values(parameters, partial=False)
    return {"attention.position": "rotary", "attention.rotary": rotary}, problems


def _settings(model: ModelSection, kinds: list[str]) -> dict[str, Any]:
    turned = model.attention.position == "rotary"
    nothing = {"rope_type": "default", "rope_theta": None}
    return {
        "layer_types": kinds,
        "rope_parameters": rope_parameters(model.attention.rotary, partial=False) if turned else nothing,
    }


def _links(ours: Collection[str]) -> tuple[Link, ...]:
    """transformers has one name for the norm after a mixer: the mixer's own (attention), or the MLP's."""
    links: list[Link] = []
    for layer in numbers_of(ours):
        mine, theirs = f"layers.{layer}", f"model.layers.{layer}"
        if f"{mine}.gated_delta.A_log" in ours:
            links += [
                Link(f"{mine}.mixer_norm", f"{theirs}.attention_layer_norm"),
                Link(f"{mine}.ffn_norm", f"{theirs}.feedforward_layer_norm"),
                *gated_delta.mixer(f"{mine}.gated_delta", f"{theirs}.linear_attn"),
            ]
        else:
            links += [
                Link(f"{mine}.mixer_norm", f"{theirs}.feedforward_layer_norm"),
                Link(f"{mine}.ffn_norm", f"{theirs}.post_feedforward_layernorm"),
            ]
    return tuple(links)


OLMO_HYBRID = Architecture(
    "olmo_hybrid",
    "OlmoHybridForCausalLM",
    LLAMA_COMMON + QK_NORMS,
    Layers({"gated_delta/mlp": "linear_attention", "attention/mlp": "full_attention"}, _values, _settings, _links),
    fields=(*(*LLAMA_SIZES, *ATTENTION_BIASES, *_OPTIONS),),
    fixed={
        **{key: value for key, value in LLAMA_FIXED.items() if key != "attention.position"},
        "residual.norm": "hybrid",
        "attention.qk_norm": "full",
        "mlp.bias": False,
        "gated_delta.convolution_bias": False,
        "gated_delta.norm_epsilon": 1e-5,  # a constant of their class
    },
    required={"hidden_act": "silu"},
    renamed=(
        (r"\binput_layernorm\b", "attention_layer_norm"),
        (r"\bpost_attention_layernorm\b", "feedforward_layer_norm"),
    ),
    newer=lambda model: "version 4 does not have the class",
)
