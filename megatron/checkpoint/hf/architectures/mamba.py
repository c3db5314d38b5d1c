"""Mamba, Mamba-2, and Bamba: Mamba-2 or attention, each with an MLP."""

from __future__ import annotations

import math
from typing import Any

from transformers import PreTrainedConfig

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.links import Link
from megatron.kinds.mamba import hf as mamba
from megatron.kinds.mamba2 import hf as mamba2
from megatron.kinds.mamba2.options import inner_channels
from megatron.kinds.mlp import hf as mlp

from ..architecture import Architecture, Field
from ..layers import Layers, uniform
from ..parts import Found, Functions, RotaryPart, unlimited
from . import common

_THEIRS = "backbone.layers.{n}"
_COMMON = (
    Link("embedding.tokens", "backbone.embeddings"),
    Link(f"{common.OURS}.mixer_norm", f"{_THEIRS}.norm"),
    Link("final_norm", "backbone.norm_f"),
    common.HEAD,
)


def _state_space(kind: str) -> tuple[Field, ...]:
    """Options with the same names for Mamba and Mamba-2, including initial values."""
    return (
        *(
            *common.STREAM,
            common.TIED,
            common.rms_norm("layer_norm_epsilon"),
            Field("residual.fp32", "residual_in_fp32"),
        ),
        *common.fields(kind, expand="expand", state_size="state_size", convolution="conv_kernel"),
        *common.fields(kind, convolution_bias="use_conv_bias", bias="use_bias"),
        *common.fields(kind, **STEPS),
    )


NO_STEP = 1e-30  # their limit where we have none: they take its logarithm, and a default for 0
STEPS = {"time_step_low": "time_step_min", "time_step_high": "time_step_max", "time_step_floor": "time_step_floor"}


MAMBA = Architecture(
    "mamba",
    "MambaForCausalLM",
    (*_COMMON, *mamba.mixer(f"{_THEIRS}.mixer")),
    uniform("mamba"),
    fields=(*_state_space("mamba"), Field("mamba.rank", "time_step_rank")),
    fixed=common.BARE,
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


MAMBA2 = Architecture(
    "mamba2",
    "Mamba2ForCausalLM",
    (*_COMMON, *mamba2.mixer(f"{_THEIRS}.mixer")),
    uniform("mamba2"),
    fields=(*_state_space("mamba2"), Field("mamba2.groups", "n_groups"), Field("mamba2.head_dim", "head_dim")),
    fixed=common.BARE,
    required={"hidden_act": "silu"},
    parts=(Functions(read_steps, lambda config: {"num_heads": heads(config.model), **write_steps(config.model)}),),
    prefix="backbone.",
    buffers=(),
    newer=_newer_groups,
)

# -- Bamba -------------------------------------------------------------------------------------------------------------

MAMBA2_SIZES = (
    *common.fields("mamba2", expand="mamba_expand", state_size="mamba_d_state", convolution="mamba_d_conv"),
    *common.fields("mamba2", groups="mamba_n_groups", convolution_bias="mamba_conv_bias", bias="mamba_proj_bias"),
)


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
    """Why version 4 gives other logits for limits of time steps. Empty without limits."""
    limited = model.mamba2.least_step > 0.0 or model.mamba2.most_step is not None
    return "version 4 does not limit the time steps and gives other logits" if limited else ""


def _newer_bamba(model: ModelSection) -> str:
    return _newer_groups(model) or newer_limits(model)


BAMBA = common.dense(
    "bamba",
    "BambaForCausalLM",
    (
        common.EMBEDDING,
        Link("final_norm", "model.final_layernorm"),
        common.HEAD,
        Link(f"{common.OURS}.mixer_norm", f"{common.THEIRS}.input_layernorm"),
        *mamba2.mixer(f"{common.THEIRS}.mamba"),
        Link(f"{common.OURS}.ffn_norm", f"{common.THEIRS}.pre_ff_layernorm"),
        *common.LLAMA_ATTENTION,
        *mlp.gated(f"{common.THEIRS}.feed_forward"),
    ),
    Layers({"mamba2/mlp": "linear_attention", "attention/mlp": "full_attention"}, _bamba_values, _bamba_settings),
    more=(*common.ATTENTION_BIASES, common.MLP_BIAS, *MAMBA2_SIZES),
    required={"hidden_act": "silu"},
    parts=(RotaryPart(partial=True),),
    newer=_newer_bamba,
)
