"""Mamba and Mamba-2 alone, and Bamba: Mamba-2 or attention, each with an MLP."""

from __future__ import annotations

import math
from typing import Any

from transformers import PreTrainedConfig

from megatron.config import Config
from megatron.config.sections.model import ModelSection
from megatron.kinds.common.links import Link
from megatron.kinds.mamba import hf as mamba
from megatron.kinds.mamba2 import hf as mamba2
from megatron.kinds.mamba2.options import inner_channels
from megatron.kinds.mlp import hf as mlp

from ..architecture import Architecture, Field
from ..layers import Layers, uniform
from ..parts import Found, Functions, RotaryPart, unlimited
from .common import (
    BARE,
    EMBEDDING,
    HEAD,
    LLAMA_ATTENTION,
    LLAMA_FIXED,
    LLAMA_SIZES,
    OURS,
    OUTPUT_BIAS,
    QKV_BIAS,
    THEIRS,
)

_THEIRS = "backbone.layers.{n}"
_COMMON = (
    Link("embedding.tokens", "backbone.embeddings"),
    Link(f"{OURS}.mixer_norm", f"{_THEIRS}.norm"),
    Link("final_norm", "backbone.norm_f"),
    HEAD,
)


def _state_space(kind: str) -> tuple[Field, ...]:
    """Options that Mamba and Mamba-2 call alike; those of initial values are told, too."""
    return (
        Field("hidden_size", "hidden_size"),
        Field("vocab_size", "vocab_size"),
        Field("embedding.tied", "tie_word_embeddings"),
        Field("norm.epsilon", "layer_norm_epsilon"),
        Field(f"{kind}.expand", "expand"),
        Field(f"{kind}.state_size", "state_size"),
        Field(f"{kind}.convolution", "conv_kernel"),
        Field(f"{kind}.convolution_bias", "use_conv_bias"),
        Field(f"{kind}.bias", "use_bias"),
        Field(f"{kind}.time_step_low", "time_step_min"),
        Field(f"{kind}.time_step_high", "time_step_max"),
        Field(f"{kind}.time_step_floor", "time_step_floor"),
        Field("residual.fp32", "residual_in_fp32"),
    )


MAMBA = Architecture(
    "mamba",
    "MambaForCausalLM",
    (*_COMMON, *mamba.mixer(f"{_THEIRS}.mixer")),
    uniform("mamba"),
    fields=(*_state_space("mamba"), Field("mamba.rank", "time_step_rank")),
    fixed=BARE,
    required={"hidden_act": "silu"},
    prefix="backbone.",
    buffers=(),
)


def read_steps(theirs: PreTrainedConfig) -> Found:
    """The limits of Mamba-2's time steps."""
    least, most = theirs.time_step_limit
    return {"mamba2.least_step": float(least), "mamba2.most_step": None if unlimited(most) else float(most)}, []


def write_steps(model: ModelSection) -> dict[str, Any]:
    own = model.mamba2
    return {"time_step_limit": (own.least_step, math.inf if own.most_step is None else own.most_step)}


def heads(model: ModelSection) -> int:
    """Heads of a Mamba-2 layer."""
    return inner_channels(model.mamba2, model.hidden_size) // model.mamba2.head_dim


def _newer_groups(model: ModelSection) -> str:
    grouped = model.mamba2.groups > 1
    return "version 4 norms the groups of Mamba-2 as one and gives other logits" if grouped else ""


def _write_mamba2(config: Config) -> dict[str, Any]:
    return {"num_heads": heads(config.model), **write_steps(config.model)}


MAMBA2 = Architecture(
    "mamba2",
    "Mamba2ForCausalLM",
    (*_COMMON, *mamba2.mixer(f"{_THEIRS}.mixer")),
    uniform("mamba2"),
    fields=(*_state_space("mamba2"), Field("mamba2.groups", "n_groups"), Field("mamba2.head_dim", "head_dim")),
    fixed=BARE,
    required={"hidden_act": "silu"},
    parts=(Functions(read_steps, _write_mamba2),),
    prefix="backbone.",
    buffers=(),
    newer=_newer_groups,
)

# -- Bamba -------------------------------------------------------------------------------------------------------------


def _bamba_values(theirs: PreTrainedConfig) -> Found:
    values, problems = read_steps(theirs)
    return {"mamba2.head_dim": theirs.mamba_d_head, **values}, problems


def _bamba_settings(model: ModelSection, kinds: list[str]) -> dict[str, Any]:
    return {
        "attn_layer_indices": [index for index, kind in enumerate(kinds) if kind == "full_attention"],
        "mamba_n_heads": heads(model),
        "mamba_d_head": model.mamba2.head_dim,
        **write_steps(model),
    }


def newer_limits(model: ModelSection) -> str:
    """Why version 4 gives other logits for limits of time steps; "" without any."""
    limited = model.mamba2.least_step > 0.0 or model.mamba2.most_step is not None
    return "version 4 does not limit the time steps and gives other logits" if limited else ""


def _newer_bamba(model: ModelSection) -> str:
    return _newer_groups(model) or newer_limits(model)


BAMBA = Architecture(
    "bamba",
    "BambaForCausalLM",
    (
        EMBEDDING,
        Link("final_norm", "model.final_layernorm"),
        HEAD,
        Link(f"{OURS}.mixer_norm", f"{THEIRS}.input_layernorm"),
        *mamba2.mixer(f"{THEIRS}.mamba"),
        Link(f"{OURS}.ffn_norm", f"{THEIRS}.pre_ff_layernorm"),
        *LLAMA_ATTENTION,
        *mlp.gated(f"{THEIRS}.feed_forward"),
    ),
    Layers({"mamba2/mlp": "linear_attention", "attention/mlp": "full_attention"}, _bamba_values, _bamba_settings),
    fields=(
        *LLAMA_SIZES,
        QKV_BIAS,
        OUTPUT_BIAS,
        Field("mlp.bias", "mlp_bias"),
        Field("mamba2.expand", "mamba_expand"),
        Field("mamba2.state_size", "mamba_d_state"),
        Field("mamba2.convolution", "mamba_d_conv"),
        Field("mamba2.groups", "mamba_n_groups"),
        Field("mamba2.convolution_bias", "mamba_conv_bias"),
        Field("mamba2.bias", "mamba_proj_bias"),
    ),
    fixed=LLAMA_FIXED,
    required={"hidden_act": "silu"},
    parts=(RotaryPart(partial=True),),
    newer=_newer_bamba,
)
