"""Attention with experts in every layer, or in most: Mixtral, Qwen's and OLMoE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.links import Link
from megatron.kinds.moe import hf as moe

from ..architecture import Architecture, Field
from ..layer_types import ByLayer
from ..layers import Layers, runs_of, uniform
from ..parts import RotaryPart, WindowPart
from .common import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    HEAD_DIM,
    LLAMA_ATTENTION,
    LLAMA_MLP,
    MOE_FIXED,
    OURS,
    OUTPUT_BIAS,
    PRE_NORMS,
    QK_NORMS,
    QKV_BIAS,
    THEIRS,
    activation,
    experts,
)

_MIXER = (EMBEDDING, *LLAMA_ATTENTION, FINAL_NORM, HEAD, *PRE_NORMS)
_NORMALIZE = Field("moe.router.normalize", "norm_topk_prob")


def _router(theirs: str) -> Link:
    return Link(f"{moe.OURS}.router", f"{theirs}.gate")


_MIXTRAL_MOE = f"{THEIRS}.block_sparse_moe"
MIXTRAL = Architecture(
    "mixtral",
    "MixtralForCausalLM",
    (*_MIXER, _router(_MIXTRAL_MOE), *moe.experts(f"{_MIXTRAL_MOE}.experts", "w1", "w3", "w2")),
    uniform("attention/moe"),
    fields=(*experts("intermediate_size", "num_local_experts"), HEAD_DIM),
    fixed={**MOE_FIXED, "attention.qkv_bias": False, "attention.output_bias": False, "moe.router.normalize": True},
    required={"router_jitter_noise": 0.0},
    parts=(RotaryPart(), WindowPart()),
)

_MLP_MOE = (_router(f"{THEIRS}.mlp"), *moe.experts(f"{THEIRS}.mlp.experts"))
OLMOE = Architecture(
    "olmoe",
    "OlmoeForCausalLM",
    (*_MIXER, *QK_NORMS, *_MLP_MOE),
    uniform("attention/moe"),
    fields=(*experts("intermediate_size", "num_experts"), _NORMALIZE, QKV_BIAS, OUTPUT_BIAS),
    fixed={**MOE_FIXED, "attention.qk_norm": "full"},
    required={"clip_qkv": None},
    parts=(RotaryPart(),),
)

# -- GPT-OSS: sinks, windows in some layers, experts with biases -------------------------------------------------------

GPT_OSS = Architecture(
    "gpt_oss",
    "GptOssForCausalLM",
    (
        *_MIXER,
        Link(f"{OURS}.attention.sinks", f"{THEIRS}.self_attn.sinks", suffixes=("",)),
        Link(f"{moe.OURS}.router", f"{THEIRS}.mlp.router"),
        *moe.experts_turned(f"{THEIRS}.mlp.experts"),
    ),
    ByLayer({"attention/moe": ""}),
    fields=(
        *(field for field in experts("intermediate_size", "num_local_experts") if field.theirs != "hidden_act"),
        *(HEAD_DIM, QKV_BIAS, OUTPUT_BIAS),
        Field("moe.limit", "swiglu_limit"),
    ),
    fixed={
        **MOE_FIXED,
        "attention.sinks": True,
        "moe.activation": "quick_gelu",
        "moe.bias": True,
        "moe.up_offset": 1.0,
        "moe.router.bias": True,
        "moe.router.normalize": True,
    },
    required={"hidden_act": "silu", "swiglu_alpha": 1.702},
    parts=(RotaryPart(),),
    newer=lambda model: "" if model.moe.limit == 7.0 else "version 4 cuts gate and up of experts at 7",
)

# -- Qwen: experts or, in some layers, an MLP --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sparse(Layers):
    def pattern(self, theirs: PreTrainedConfig) -> str:
        dense = set(theirs.mlp_only_layers or ())
        blocks = [
            "attention/mlp" if index in dense or (index + 1) % theirs.decoder_sparse_step else "attention/moe"
            for index in range(theirs.num_hidden_layers)
        ]
        return runs_of(blocks)


def _settings(_model: ModelSection, kinds: list[str]) -> dict[str, Any]:
    return {"decoder_sparse_step": 1, "mlp_only_layers": [index for index, kind in enumerate(kinds) if kind == "dense"]}


_SPARSE = _Sparse({"attention/moe": "sparse", "attention/mlp": "dense"}, settings=_settings)
_QWEN = (
    *experts("moe_intermediate_size", "num_experts"),
    _NORMALIZE,
    Field("mlp.hidden_size", "intermediate_size"),
    activation("hidden_act"),
)
_QWEN_FIXED = {**MOE_FIXED, "mlp.gated": True, "mlp.bias": False}

QWEN2_MOE = Architecture(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    (*(*_MIXER, *_MLP_MOE, *LLAMA_MLP), *moe.shared(f"{THEIRS}.mlp.shared_expert", f"{THEIRS}.mlp.shared_expert_gate")),
    _SPARSE,
    fields=(
        *_QWEN,
        Field("moe.shared_size", "shared_expert_intermediate_size"),
        Field("attention.qkv_bias", "qkv_bias"),
    ),
    fixed={
        **{key: value for key, value in _QWEN_FIXED.items() if key != "moe.shared_size"},
        "moe.shared_gate": True,
        "attention.output_bias": False,
    },
    required={"use_sliding_window": False},
    parts=(RotaryPart(),),
)


def _older_qwen3(settings: dict[str, Any]) -> dict[str, Any]:
    """Version 4 knows no other name and would make 128 experts."""
    return {"num_experts": settings["num_local_experts"]}


QWEN3_MOE = Architecture(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    (*_MIXER, *QK_NORMS, *_MLP_MOE, *LLAMA_MLP),
    _SPARSE,
    fields=(*_QWEN, Field("attention.head_dim", "head_dim", optional=True), QKV_BIAS, OUTPUT_BIAS),
    fixed={**_QWEN_FIXED, "attention.qk_norm": "head"},
    required={"use_sliding_window": False},
    parts=(RotaryPart(),),
    older=_older_qwen3,
)
