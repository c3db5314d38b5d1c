"""Falcon-H1: attention and Mamba-2 in parallel in each layer, with multipliers throughout the model."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from megatron.config import Config
from megatron.config.sections.model import ModelSection
from megatron.kinds.common.links import Link
from megatron.kinds.mamba2 import hf as mamba2
from megatron.kinds.mamba2.options import inner_channels
from megatron.kinds.mlp import hf as mlp

from ..architecture import Field
from ..layers import uniform
from ..parts import Found, Functions, RotaryPart
from .common import ATTENTION_BIASES, EMBEDDING, HEAD, LLAMA_ATTENTION, MLP_BIAS, THEIRS, dense, fields, norms
from .mamba import MAMBA2_SIZES, heads, newer_limits, read_steps, write_steps

_PARTS = ("z", "x", "B", "C", "dt")  # of Mamba-2's first projection, in the order of their list


def _read(theirs: PreTrainedConfig) -> Found:
    inner = theirs.mamba_d_ssm or theirs.mamba_expand * theirs.hidden_size
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    placed = "before_gate" if theirs.mamba_norm_before_gate else "after_gate"
    gate, down = theirs.mlp_multipliers
    values, problems = read_steps(theirs)
    if theirs.mamba_proj_bias != theirs.projectors_bias:
        problems.append("mamba_proj_bias and projectors_bias must be equal: both projections have a bias here or none")
    return {
        **values,
        "attention.scale": head_dim**-0.5 * theirs.key_multiplier,
        "mamba2.inner_size": None if inner == theirs.mamba_expand * theirs.hidden_size else inner,
        "mamba2.head_dim": inner // theirs.mamba_n_heads,
        "mamba2.norm": placed if theirs.mamba_rms_norm else "none",
        **{f"mamba2.multipliers.{part}": float(each) for part, each in zip(_PARTS, theirs.ssm_multipliers)},
        "mlp.gate_multiplier": float(gate),
        "mlp.output_multiplier": float(down),
    }, problems


def _write(config: Config) -> dict[str, Any]:
    model: ModelSection = config.model
    own, attention = model.mamba2, model.attention
    return {
        "key_multiplier": attention.scale / attention.head_dim**-0.5,
        "mamba_d_ssm": inner_channels(own, model.hidden_size),
        "mamba_n_heads": heads(model),
        "mamba_d_head": own.head_dim,
        "mamba_rms_norm": own.norm != "none",
        "mamba_norm_before_gate": own.norm == "before_gate",
        "projectors_bias": own.bias,
        "ssm_multipliers": [getattr(own.multipliers, part) for part in _PARTS],
        "mlp_multipliers": [model.mlp.gate_multiplier, model.mlp.output_multiplier],
        **write_steps(model),
    }


FALCON_H1 = dense(
    "falcon_h1",
    "FalconH1ForCausalLM",
    (
        EMBEDDING,
        *norms("input_layernorm", "pre_ff_layernorm"),
        *LLAMA_ATTENTION,
        *mamba2.mixer(f"{THEIRS}.mamba"),
        *mlp.gated(f"{THEIRS}.feed_forward"),
        Link("final_norm", "model.final_layernorm"),
        HEAD,
    ),
    uniform("attention&mamba2/mlp"),
    more=(
        *(*ATTENTION_BIASES, MLP_BIAS, *MAMBA2_SIZES),
        Field("attention.head_dim", "head_dim", optional=True),
        *fields("attention", input_multiplier="attention_in_multiplier", output_multiplier="attention_out_multiplier"),
        *fields("mamba2", input_multiplier="ssm_in_multiplier", output_multiplier="ssm_out_multiplier"),
        Field("embedding.multiplier", "embedding_multiplier"),
        Field("head.multiplier", "lm_head_multiplier"),
    ),
    required={"hidden_act": "silu"},
    parts=(RotaryPart(), Functions(_read, _write)),
    newer=newer_limits,
)
