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
from . import common

_MIXER = (common.EMBEDDING, *common.LLAMA_ATTENTION, common.FINAL_NORM, common.HEAD, *common.PRE_NORMS)
_NORMALIZE = Field("moe.router.normalize", "norm_topk_prob")


def _router(theirs: str) -> Link:
    return Link(f"{moe.OURS}.router", f"{theirs}.gate")


_MIXTRAL_MOE = f"{common.THEIRS}.block_sparse_moe"
MIXTRAL = Architecture(
    "mixtral",
    "MixtralForCausalLM",
    (*_MIXER, _router(_MIXTRAL_MOE), *moe.experts(f"{_MIXTRAL_MOE}.experts", "w1", "w3", "w2")),
    uniform("attention/moe"),
    fields=(*common.experts("intermediate_size", "num_local_experts"), common.HEAD_DIM),
    fixed={**common.MOE_FIXED, **common.NO_ATTENTION_BIAS, "moe.router.normalize": True},
    required={"router_jitter_noise": 0.0},
    parts=(RotaryPart(), WindowPart()),
)

_MLP_MOE = (_router(f"{common.THEIRS}.mlp"), *moe.experts(f"{common.THEIRS}.mlp.experts"))
OLMOE = Architecture(
    "olmoe",
    "OlmoeForCausalLM",
    (*_MIXER, *common.QK_NORMS, *_MLP_MOE),
    uniform("attention/moe"),
    fields=(*common.experts("intermediate_size", "num_experts"), _NORMALIZE, *common.ATTENTION_BIASES),
    fixed={**common.MOE_FIXED, "attention.qk_norm": "full"},
    required={"clip_qkv": None},
    parts=(RotaryPart(),),
)

# -- GPT-OSS: sinks, windows in some layers, experts with biases -------------------------------------------------------

GPT_OSS = Architecture(
    "gpt_oss",
    "GptOssForCausalLM",
    (
        *_MIXER,
        Link(f"{common.OURS}.attention.sinks", f"{common.THEIRS}.self_attn.sinks", suffixes=("",)),
        Link(f"{moe.OURS}.router", f"{common.THEIRS}.mlp.router"),
        *moe.experts_turned(f"{common.THEIRS}.mlp.experts"),
    ),
    ByLayer({"attention/moe": ""}),
    fields=(
        *(field for field in common.experts("intermediate_size", "num_local_experts") if field.theirs != "hidden_act"),
        *(common.HEAD_DIM, *common.ATTENTION_BIASES, Field("moe.limit", "swiglu_limit")),
    ),
    fixed={
        **common.MOE_FIXED,
        "attention.sinks": True,
        **common.options("moe", activation="quick_gelu", bias=True, up_offset=1.0),
        **common.options("moe.router", bias=True, normalize=True),
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
    *common.experts("moe_intermediate_size", "num_experts"),
    _NORMALIZE,
    Field("mlp.hidden_size", "intermediate_size"),
    common.activation("hidden_act"),
)
_QWEN_FIXED = {**common.MOE_FIXED, **common.options("mlp", gated=True, bias=False)}

QWEN2_MOE = Architecture(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    (
        *(*_MIXER, *_MLP_MOE, *common.LLAMA_MLP),
        *moe.shared(f"{common.THEIRS}.mlp.shared_expert", f"{common.THEIRS}.mlp.shared_expert_gate"),
    ),
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


QWEN3_MOE = Architecture(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    (*_MIXER, *common.QK_NORMS, *_MLP_MOE, *common.LLAMA_MLP),
    _SPARSE,
    fields=(*_QWEN, Field("attention.head_dim", "head_dim", optional=True), *common.ATTENTION_BIASES),
    fixed={**_QWEN_FIXED, "attention.qk_norm": "head"},
    required={"use_sliding_window": False},
    parts=(RotaryPart(),),
    older=lambda settings: {"num_experts": settings["num_local_experts"]},  # without it version 4 makes 128
)
