"""Gemma 1 to 3: from 2 on norms on both sides, attention with a window in some layers."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.links import Link

from ..architecture import Architecture, Field, Power
from ..layer_types import ByLayer, near_rotary
from ..layers import uniform
from ..parts import Functions, RotaryPart
from .common import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    HEAD_DIM,
    LLAMA_ATTENTION,
    LLAMA_FIXED,
    LLAMA_LINKS,
    LLAMA_MLP,
    LLAMA_SIZES,
    OURS,
    OUTPUT_BIAS,
    QK_NORMS,
    QKV_BIAS,
    THEIRS,
    activation,
)

_LINKS = (
    *(EMBEDDING, *LLAMA_ATTENTION, *LLAMA_MLP, HEAD, FINAL_NORM),
    Link(f"{OURS}.mixer_norm", f"{THEIRS}.input_layernorm"),
    Link(f"{OURS}.mixer_output_norm", f"{THEIRS}.post_attention_layernorm"),
    Link(f"{OURS}.ffn_norm", f"{THEIRS}.pre_feedforward_layernorm"),
    Link(f"{OURS}.ffn_output_norm", f"{THEIRS}.post_feedforward_layernorm"),
)
_FIELDS = (
    *(field for field in LLAMA_SIZES if field.theirs != "hidden_act"),
    activation("hidden_activation"),
    HEAD_DIM,
    QKV_BIAS,
    OUTPUT_BIAS,
    Power("attention.scale", "query_pre_attn_scalar", power=-0.5),
    Field("head.softcap", "final_logit_softcapping"),
)
_FIXED = {**LLAMA_FIXED, "residual.norm": "both", "norm.unit_offset": True, "mlp.bias": False}


def _more(theirs: PreTrainedConfig) -> dict[str, Any]:
    return {"embedding.multiplier": theirs.hidden_size**0.5}


GEMMA = Architecture(
    "gemma",
    "GemmaForCausalLM",
    LLAMA_LINKS,
    uniform("attention/mlp"),
    fields=(*LLAMA_SIZES, HEAD_DIM, QKV_BIAS, OUTPUT_BIAS),
    fixed={**LLAMA_FIXED, "norm.unit_offset": True, "mlp.bias": False},
    required={"use_bidirectional_attention": None},
    parts=(RotaryPart(), Functions(lambda theirs: (_more(theirs), []))),
)

GEMMA2 = Architecture(
    "gemma2",
    "Gemma2ForCausalLM",
    _LINKS,
    ByLayer({"attention/mlp": ""}, more=_more),
    fields=(*_FIELDS, Field("attention.softcap", "attn_logit_softcapping")),
    fixed=_FIXED,
    required={"use_bidirectional_attention": None},
    parts=(RotaryPart(),),
)


def _newer(model: ModelSection) -> str:
    near = near_rotary(model)
    scaled = near is not None and near.scaling.type != "none"
    return "version 4 has no rotary scaling in layers with a window" if scaled else ""


def _older(settings: dict[str, Any]) -> dict[str, Any]:
    return {"rope_local_base_freq": settings["rope_parameters"]["sliding_attention"]["rope_theta"]}


GEMMA3 = Architecture(
    "gemma3_text",
    "Gemma3ForCausalLM",
    (*_LINKS, *QK_NORMS),
    ByLayer({"attention/mlp": ""}, ropes=True, more=_more),
    fields=_FIELDS,
    fixed={**_FIXED, "attention.qk_norm": "head"},
    # its attention has the option and does not use it
    required={"use_bidirectional_attention": False, "attn_logit_softcapping": None},
    buffers=(r".*rotary_emb\..*",),
    newer=_newer,
    older=_older,
)
