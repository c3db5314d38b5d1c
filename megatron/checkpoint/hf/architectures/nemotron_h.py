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
from . import common
from .deepseek import V3_FIELDS, V3_ROUTER
from .mamba import NO_STEP, heads

_LAYER = "backbone.layers.{n}"
_MIXER = f"{_LAYER}.mixer"

_LINKS = (
    Link("embedding.tokens", "backbone.embeddings"),
    Link(f"{common.OURS}.mixer_norm", f"{_LAYER}.norm"),
    Link(f"{common.OURS}.ffn_norm", f"{_LAYER}.norm"),
    *mamba2.mixer(_MIXER),
    *attention.separate(_MIXER),
    *mlp.plain(f"{_MIXER}.up_proj", f"{_MIXER}.down_proj"),
    Link(f"{moe.OURS}.router", f"{_MIXER}.gate", suffixes=("weight",)),
    Link(f"{moe.OURS}.router.correction", f"{_MIXER}.gate.e_score_correction_bias", suffixes=("",)),
    *moe.plain_experts(f"{_MIXER}.experts"),
    Link(f"{moe.OURS}.shared.up", f"{_MIXER}.shared_experts.up_proj"),
    Link(f"{moe.OURS}.shared.down", f"{_MIXER}.shared_experts.down_proj"),
    Link("final_norm", "backbone.norm_f"),
    common.HEAD,
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


_FIELDS = (
    *(*common.STREAM, Field("residual.fp32", "residual_in_fp32"), common.MLP_BIAS, common.HEAD_DIM),
    *common.fields("attention", heads="num_attention_heads", kv_heads="num_key_value_heads"),
    Field("mlp.hidden_size", "intermediate_size"),
    *common.fields(
        "mamba2", expand="expand", head_dim="mamba_head_dim", state_size="ssm_state_size", groups="n_groups"
    ),
    *common.fields("mamba2", convolution="conv_kernel", convolution_bias="use_conv_bias", bias="use_bias"),
    *common.fields("mamba2", time_step_high="time_step_max", time_step_floor="time_step_floor"),
    *common.fields("moe", hidden_size="moe_intermediate_size", shared_size="moe_shared_expert_intermediate_size"),
    *common.fields("moe", experts="n_routed_experts", top_k="num_experts_per_tok"),
    *(*V3_FIELDS, Field("moe.router.scale", "routed_scaling_factor")),
    *(
        common.rms_norm("layer_norm_epsilon"),
        common.activation("mlp_hidden_act"),
        common.activation("mlp_hidden_act", "moe"),
    ),
)

NEMOTRON_H = Architecture(
    "nemotron_h",
    "NemotronHForCausalLM",
    _LINKS,
    Layers(
        {"mamba2": "linear_attention", "attention": "full_attention", "mlp": "mlp", "moe": "moe"}, _values, _settings
    ),
    fields=_FIELDS,
    fixed={
        **common.BARE,
        "embedding.tied": False,
        **{**common.NO_ATTENTION_BIAS, **common.options("attention", position="none", qk_norm="none")},
        "mlp.gated": False,
        **{**common.EXPERTS_FIXED, **V3_ROUTER, **common.options("moe", gated=False, shared_gate=False)},
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
