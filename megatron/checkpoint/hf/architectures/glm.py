"""GLM-4.5 and 4.6: attention, an MLP in the first layers, and experts chosen as in DeepSeek-V3 in the others."""

from __future__ import annotations

from collections.abc import Collection

from megatron.kinds.common.links import Link

from ..architecture import Architecture, Field
from ..parts import Functions, RotaryPart
from . import common
from .deepseek import CORRECTION, FFNS, MOE_FIELDS, SHARED_EXPERTS, V3_FIELDS, V3_FIXED, FirstDense, dense_layers

_FIXED = {**common.ATTENTION_FIXED, **V3_FIXED, "attention.output_bias": False}
del _FIXED["attention.qk_norm"]  # an option of theirs


def _norms(ours: Collection[str]) -> tuple[Link, ...]:
    return common.QK_NORMS if any(".query_norm." in name for name in ours) else ()


GLM4_MOE = Architecture(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    (common.EMBEDDING, *common.LLAMA_ATTENTION, common.FINAL_NORM, common.HEAD, *common.PRE_NORMS, *FFNS, CORRECTION),
    FirstDense(
        {"attention/moe": "sparse", "attention/mlp": "dense"},
        settings=dense_layers,
        links=_norms,
        needed=("attention/moe",),
    ),
    fields=(
        *common.SIZES,
        Field("attention.kv_heads", "num_key_value_heads"),
        Field("attention.head_dim", "head_dim", optional=True),
        Field("attention.qk_norm", "use_qk_norm", {"head": True, "none": False}),
        common.QKV_BIAS,
        common.rms_norm(),
        *MOE_FIELDS,
        *V3_FIELDS,
    ),
    fixed=_FIXED,
    parts=(RotaryPart(partial=True), SHARED_EXPERTS, Functions(write=lambda config: {"num_nextn_predict_layers": 0})),
    predicts_more=True,
)
