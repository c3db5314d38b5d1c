"""GLM-4.5 and 4.6: attention, an MLP in the first layers, and experts chosen as in DeepSeek-V3 in the others."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from megatron.config import Config
from megatron.kinds.common.links import Link

from ..architecture import Architecture, Field
from ..parts import Functions, RotaryPart
from .common import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    LLAMA_ATTENTION,
    LLAMA_FIXED,
    PRE_NORMS,
    QK_NORMS,
    QKV_BIAS,
    SIZES,
    rms_norm,
)
from .deepseek import CORRECTION, FFNS, MOE_FIELDS, SHARED_EXPERTS, V3_FIELDS, V3_FIXED, FirstDense, dense_layers

_CHOSEN = ("attention.qk_norm", "mlp.gated")
_FIXED = {**{key: value for key, value in LLAMA_FIXED.items() if key not in _CHOSEN}, **V3_FIXED}


def _norms(ours: Collection[str]) -> tuple[Link, ...]:
    return QK_NORMS if any(".query_norm." in name for name in ours) else ()


def _no_further(_config: Config) -> dict[str, Any]:
    return {"num_nextn_predict_layers": 0}


GLM4_MOE = Architecture(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    (EMBEDDING, *LLAMA_ATTENTION, FINAL_NORM, HEAD, *PRE_NORMS, *FFNS, CORRECTION),
    FirstDense(
        {"attention/moe": "sparse", "attention/mlp": "dense"},
        settings=dense_layers,
        links=_norms,
        needed=("attention/moe",),
    ),
    fields=(
        *SIZES,
        Field("attention.kv_heads", "num_key_value_heads"),
        Field("attention.head_dim", "head_dim", optional=True),
        Field("attention.qk_norm", "use_qk_norm", {"head": True, "none": False}),
        QKV_BIAS,
        rms_norm(),
        *MOE_FIELDS,
        *V3_FIELDS,
    ),
    fixed={
        **{key: value for key, value in _FIXED.items() if key != "attention.qk_norm"},
        "attention.output_bias": False,
    },
    parts=(RotaryPart(partial=True), SHARED_EXPERTS, Functions(write=_no_further)),
    predicts_more=True,
)
