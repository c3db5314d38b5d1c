"""Nemotron-H: Mamba-2, attention without positions, an MLP or experts, each as a layer of its own."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from megatron.config.sections.model import ModelSection
from megatron.kinds.attention import hf as attention
from megatron.kinds.common.links import Link
from megatron.kinds.mamba2 import hf as mamba2
from megatron.kinds.mlp import hf as mlp
from megatron.kinds.moe import hf as moe

from ..architecture import Architecture, Field
from ..layers import Layers
from ..parts import Found
from .common import BARE, HEAD, MOE_FIXED, OURS, activation, rms_norm
from .mamba import heads

_LAYER = "backbone.layers.{n}"
_MIXER = f"{_LAYER}.mixer"
NO_STEP = 1e-30  # stands for a limit of 0, below which transformers' own default would be taken

_LINKS = (
    Link("embedding.tokens", "backbone.embeddings"),
    Link(f"{OURS}.mixer_norm", f"{_LAYER}.norm"),
    Link(f"{OURS}.ffn_norm", f"{_LAYER}.norm"),
    *mamba2.mixer(_MIXER),
    *attention.separate(_MIXER),
    *mlp.plain(f"{_MIXER}.up_proj", f"{_MIXER}.down_proj"),
    Link(f"{moe.OURS}.router", f"{_MIXER}.gate", suffixes=("weight",)),
    Link(f"{moe.OURS}.router.correction", f"{_MIXER}.gate.e_score_correction_bias", suffixes=("",)),
    *moe.plain_experts(f"{_MIXER}.experts"),
    Link(f"{moe.OURS}.shared.up", f"{_MIXER}.shared_experts.up_proj"),
    Link(f"{moe.OURS}.shared.down", f"{_MIXER}.shared_experts.down_proj"),
    Link("final_norm", "backbone.norm_f"),
    HEAD,
)


def _values(theirs: PreTrainedConfig) -> Found:
    """transformers raises time steps to `time_step_min` and limits them nowhere else."""
    inner, least = theirs.mamba_num_heads * theirs.mamba_head_dim, float(theirs.time_step_min)
    return {
        "mamba2.inner_size": None if inner == theirs.expand * theirs.hidden_size else inner,
        "mamba2.least_step": least if least > NO_STEP else 0.0,
    }, []


def _settings(model: ModelSection, kinds: list[str]) -> dict[str, Any]:
    return {
        "layers_block_type": kinds,
        "mamba_num_heads": heads(model),
        "time_step_min": max(model.mamba2.least_step, NO_STEP),
    }


_FIELDS = {  # ours -> theirs
    "hidden_size": "hidden_size",
    "vocab_size": "vocab_size",
    "residual.fp32": "residual_in_fp32",
    "attention.heads": "num_attention_heads",
    "attention.kv_heads": "num_key_value_heads",
    "attention.head_dim": "head_dim",
    "mlp.hidden_size": "intermediate_size",
    "mlp.bias": "mlp_bias",
    "mamba2.expand": "expand",
    "mamba2.head_dim": "mamba_head_dim",
    "mamba2.state_size": "ssm_state_size",
    "mamba2.groups": "n_groups",
    "mamba2.convolution": "conv_kernel",
    "mamba2.convolution_bias": "use_conv_bias",
    "mamba2.bias": "use_bias",
    "mamba2.time_step_high": "time_step_max",
    "mamba2.time_step_floor": "time_step_floor",
    "moe.hidden_size": "moe_intermediate_size",
    "moe.shared_size": "moe_shared_expert_intermediate_size",
    "moe.experts": "n_routed_experts",
    "moe.top_k": "num_experts_per_tok",
    "moe.router.scale": "routed_scaling_factor",
    "moe.router.normalize": "norm_topk_prob",
    "moe.router.groups": "n_group",
    "moe.router.top_groups": "topk_group",
}
_OTHER = ("moe.gated", "moe.shared_size", "moe.router.scale", "moe.router.groups")

NEMOTRON_H = Architecture(
    "nemotron_h",
    "NemotronHForCausalLM",
    _LINKS,
    Layers(
        {"mamba2": "linear_attention", "attention": "full_attention", "mlp": "mlp", "moe": "moe"}, _values, _settings
    ),
    fields=(
        *(Field(ours, theirs) for ours, theirs in _FIELDS.items()),
        rms_norm("layer_norm_epsilon"),
        activation("mlp_hidden_act"),
        activation("mlp_hidden_act", "moe"),
    ),
    fixed={
        **BARE,
        "embedding.tied": False,
        "attention.position": "none",
        "attention.qk_norm": "none",
        "attention.qkv_bias": False,
        "attention.output_bias": False,
        "mlp.gated": False,
        **{key: value for key, value in MOE_FIXED.items() if key.startswith("moe.") and key not in _OTHER},
        "moe.gated": False,
        "moe.shared_gate": False,
        "moe.router.score": "sigmoid",
        "moe.router.correction": "sign",
        "moe.router.group_score": "top_two",
        "mamba2.most_step": None,
    },
    required={
        "tie_word_embeddings": False,
        "mamba_hidden_act": "silu",
        "moe_latent_size": None,
        "sliding_window": None,
    },
    renamed=((r"^model\.", "backbone."),),
    prefix="backbone.",
    predicts_more=True,
    newer=lambda model: "version 4 does not have the class",
)
