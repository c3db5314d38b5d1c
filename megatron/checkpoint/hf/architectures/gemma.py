"""Gemma 1 to 3: from 2 on norms on both sides, attention with a window in some layers."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.links import Link

from ..architecture import Architecture, Field, Power
from ..layer_types import ByLayer, near_rotary
from ..parts import Functions, RotaryPart
from . import common

_LINKS = (
    *(common.EMBEDDING, *common.LLAMA_ATTENTION, *common.LLAMA_MLP, common.HEAD, common.FINAL_NORM),
    Link(f"{common.OURS}.mixer_norm", f"{common.THEIRS}.input_layernorm"),
    Link(f"{common.OURS}.mixer_output_norm", f"{common.THEIRS}.post_attention_layernorm"),
    Link(f"{common.OURS}.ffn_norm", f"{common.THEIRS}.pre_feedforward_layernorm"),
    Link(f"{common.OURS}.ffn_output_norm", f"{common.THEIRS}.post_feedforward_layernorm"),
)
_FIELDS = (
    *(field for field in common.LLAMA_SIZES if field.theirs != "hidden_act"),
    *(common.activation("hidden_activation"), common.HEAD_DIM, *common.ATTENTION_BIASES),
    Power("attention.scale", "query_pre_attn_scalar", power=-0.5),
    Field("head.softcap", "final_logit_softcapping"),
)
_FIXED = {**common.LLAMA_FIXED, "residual.norm": "both", "norm.unit_offset": True, "mlp.bias": False}


def _more(theirs: PreTrainedConfig) -> dict[str, Any]:
    return {"embedding.multiplier": theirs.hidden_size**0.5}


GEMMA = common.dense(
    "gemma",
    "GemmaForCausalLM",
    common.LLAMA_LINKS,
    more=(common.HEAD_DIM, *common.ATTENTION_BIASES),
    fixed={"norm.unit_offset": True, "mlp.bias": False},
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
    (*_LINKS, *common.QK_NORMS),
    ByLayer({"attention/mlp": ""}, ropes=True, more=_more),
    fields=_FIELDS,
    fixed={**_FIXED, "attention.qk_norm": "head"},
    # its attention has the option and does not use it
    required={"use_bidirectional_attention": False, "attn_logit_softcapping": None},
    buffers=(r".*rotary_emb\..*",),
    newer=_newer,
    older=_older,
)
