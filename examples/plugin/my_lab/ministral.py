"""Ministral (Mistral AI 2024), an architecture of transformers: Mistral with a window in some layers."""

from megatron.checkpoint.hf.architecture import Architecture
from megatron.checkpoint.hf.architectures import common
from megatron.checkpoint.hf.layer_types import ByLayer, RotaryPart

MINISTRAL = Architecture(
    "ministral",
    common.LLAMA_LINKS,
    ByLayer({"attention/mlp": ""}),
    fields=(*common.LLAMA_SIZES, common.HEAD_DIM),
    fixed={**common.LLAMA_FIXED, **common.NO_BIAS},
    parts=(RotaryPart(),),
)
