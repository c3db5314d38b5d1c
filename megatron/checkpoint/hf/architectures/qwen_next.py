"""Qwen3-Next and the text models of Qwen3.5: Gated DeltaNet or attention with a gate, an MLP or experts."""

from dataclasses import dataclass, replace
from typing import Any

from megatron.config.sections.model import ModelSection
from megatron.kinds.attention import hf as attention
from megatron.kinds.common.links import Link
from megatron.kinds.gated_delta import hf as gated_delta

from ..architecture import Architecture, Found, Layers, listed
from ..layer_types import RotaryPart
from . import common
from .experts import MLP_MOE, QWEN, SHARED, SHARED_SIZE, sparse, sparse_settings

_MIXERS = {"gated_delta": "linear_attention", "attention": "full_attention"}
_QUERY, _KEY_VALUE, _OUTPUT = common.LLAMA_ATTENTION
_COMMON = (
    *(common.EMBEDDING, common.FINAL_NORM, common.HEAD, *common.PRE_NORMS, _KEY_VALUE, _OUTPUT, *common.QK_NORMS),
    Link((f"{attention.OURS}.query", f"{attention.OURS}.gate"), _QUERY.theirs, attention.query_gate_by_head),
)
_THEIRS = f"{common.THEIRS}.linear_attn"
_DELTA = (
    *common.fields("gated_delta", heads="linear_num_value_heads", key_heads="linear_num_key_heads"),
    *common.fields("gated_delta", key_dim="linear_key_head_dim", value_dim="linear_value_head_dim"),
    *common.fields("gated_delta", convolution="linear_conv_kernel_dim"),
)
_ATTENTION = (common.HEAD_DIM, *common.ATTENTION_BIASES)
_FIXED = {
    **common.ATTENTION_FIXED,
    "norm.unit_offset": True,
    **common.options("attention", qk_norm="head", gate="channel"),
    **common.options("gated_delta", convolution_bias=False, negative_eigenvalues=False),
}
_MLP_FIXED = common.options("mlp", gated=True, bias=False)
_MOE_FIXED = {**common.EXPERTS_FIXED, "moe.shared_gate": True, **common.options("moe.router", scale=1.0, groups=1)}


def _settings(model: ModelSection, names: list[str]) -> dict[str, Any]:
    found = listed(model, names)
    return {"layer_types": found["layer_types"], **sparse_settings(model, found["mlp_layer_types"])}


def _layers(ffn: str) -> Layers:
    """Layers that all have this feed-forward network."""
    return Layers(
        {f"{ours}/{ffn}": theirs for ours, theirs in _MIXERS.items()},
        settings=lambda model, names: {"layer_types": names},
    )


QWEN3_NEXT = Architecture(
    "qwen3_next",
    (*_COMMON, *gated_delta.qwen(_THEIRS, joined=True), *common.LLAMA_MLP, *MLP_MOE, *SHARED),
    common.mixed(_MIXERS, settings=_settings, ffns=sparse),
    fields=(*QWEN, SHARED_SIZE, *_ATTENTION, *_DELTA),
    fixed={**_FIXED, **_MOE_FIXED, **_MLP_FIXED},
    parts=(RotaryPart(partial=True),),
    predicts_more=True,
)


@dataclass(frozen=True)
class _TextRotary(RotaryPart):
    """Positions of images have three numbers, which a text's tokens have too, all equal."""

    def read(self, theirs: Any) -> Found:
        values, problems = super().read(theirs)
        return values, [each for each in problems if not each.startswith("rope_parameters.mrope_")]


QWEN3_5 = replace(
    QWEN3_NEXT,
    name="qwen3_5_text",
    links=(*_COMMON, *gated_delta.qwen(_THEIRS, joined=False), *common.LLAMA_MLP),
    layers=_layers("mlp"),
    fields=(*common.LLAMA_SIZES, *_ATTENTION, *_DELTA),
    fixed={**_FIXED, **_MLP_FIXED},
    parts=(_TextRotary(partial=True),),
    newer=lambda model: "version 4 does not have the class",
)

QWEN3_5_MOE = replace(
    QWEN3_5,
    name="qwen3_5_moe_text",
    links=(*_COMMON, *gated_delta.qwen(_THEIRS, joined=False), *MLP_MOE, *SHARED),
    layers=_layers("moe"),
    fields=(*common.experts("moe_intermediate_size", "num_experts"), SHARED_SIZE, *_ATTENTION, *_DELTA),
    fixed={**_FIXED, **_MOE_FIXED, "moe.router.normalize": True},
)
