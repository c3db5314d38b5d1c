"""Architectures of Llama's kind: rotary attention and a gated MLP in every layer."""

from __future__ import annotations

from megatron.config.sections.model import ModelSection
from megatron.kinds.attention import hf as attention
from megatron.kinds.common.links import Link
from megatron.kinds.mlp import hf as mlp

from ..architecture import Architecture, Field, Power
from ..layer_types import ByLayer, near_rotary, windowed
from ..layers import uniform
from ..parts import RotaryPart, WindowPart
from .common import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    HEAD_DIM,
    INTERLEAVED_ATTENTION,
    LLAMA_ATTENTION,
    LLAMA_COMMON,
    LLAMA_FIXED,
    LLAMA_LINKS,
    LLAMA_MLP,
    LLAMA_SIZES,
    NO_BIAS,
    OURS,
    OUTPUT_BIAS,
    POST_NORMS,
    PRE_NORMS,
    QK_NORMS,
    QKV_BIAS,
    THEIRS,
)

_BLOCK = "attention/mlp"

LLAMA = Architecture(
    "llama",
    "LlamaForCausalLM",
    LLAMA_LINKS,
    uniform(_BLOCK),
    fields=(*LLAMA_SIZES, HEAD_DIM, QKV_BIAS, OUTPUT_BIAS, Field("mlp.bias", "mlp_bias")),
    fixed=LLAMA_FIXED,
    parts=(RotaryPart(),),
)

MISTRAL = Architecture(
    "mistral",
    "MistralForCausalLM",
    LLAMA_LINKS,
    uniform(_BLOCK),
    fields=(*LLAMA_SIZES, HEAD_DIM),
    fixed={**LLAMA_FIXED, **NO_BIAS},
    parts=(RotaryPart(), WindowPart()),
)

QWEN2 = Architecture(
    "qwen2",
    "Qwen2ForCausalLM",
    LLAMA_LINKS,
    windowed(_BLOCK),
    fields=LLAMA_SIZES,
    fixed={**LLAMA_FIXED, "attention.qkv_bias": True, "attention.output_bias": False, "mlp.bias": False},
    parts=(RotaryPart(),),
)

QWEN3 = Architecture(
    "qwen3",
    "Qwen3ForCausalLM",
    LLAMA_LINKS + QK_NORMS,
    windowed(_BLOCK),
    fields=(*LLAMA_SIZES, HEAD_DIM, QKV_BIAS, OUTPUT_BIAS),
    fixed={**LLAMA_FIXED, "attention.qk_norm": "head", "mlp.bias": False},
    parts=(RotaryPart(),),
)

SMOLLM3 = Architecture(
    "smollm3",
    "SmolLM3ForCausalLM",
    LLAMA_LINKS,
    ByLayer({_BLOCK: ""}, unturned=True),
    fields=(*LLAMA_SIZES, QKV_BIAS, OUTPUT_BIAS, Field("mlp.bias", "mlp_bias")),
    fixed=LLAMA_FIXED,
    parts=(RotaryPart(),),
)

SEED_OSS = Architecture(
    "seed_oss",
    "SeedOssForCausalLM",
    LLAMA_LINKS,
    uniform(_BLOCK),
    fields=(
        *LLAMA_SIZES,
        HEAD_DIM,
        QKV_BIAS,
        Field("attention.output_bias", "attention_out_bias"),
        Field("mlp.bias", "mlp_bias"),
    ),
    fixed=LLAMA_FIXED,
    parts=(RotaryPart(),),
)

_UNGATED = mlp.plain(f"{THEIRS}.mlp.up_proj", f"{THEIRS}.mlp.down_proj")
ARCEE = Architecture(
    "arcee",
    "ArceeForCausalLM",
    (EMBEDDING, *LLAMA_ATTENTION, *_UNGATED, FINAL_NORM, HEAD, *PRE_NORMS),
    uniform(_BLOCK),
    fields=(*LLAMA_SIZES, HEAD_DIM, QKV_BIAS, OUTPUT_BIAS, Field("mlp.bias", "mlp_bias")),
    fixed={**LLAMA_FIXED, "mlp.gated": False},
    parts=(RotaryPart(),),
)

GRANITE = Architecture(
    "granite",
    "GraniteForCausalLM",
    LLAMA_LINKS,
    uniform(_BLOCK),
    fields=(
        *LLAMA_SIZES,
        QKV_BIAS,
        OUTPUT_BIAS,
        Field("mlp.bias", "mlp_bias"),
        Field("embedding.multiplier", "embedding_multiplier"),
        Field("residual.multiplier", "residual_multiplier"),
        Field("attention.scale", "attention_multiplier"),
        Power("head.multiplier", "logits_scaling"),
    ),
    fixed=LLAMA_FIXED,
    parts=(RotaryPart(),),
)

# -- OLMo --------------------------------------------------------------------------------------------------------------

OLMO = Architecture(
    "olmo",
    "OlmoForCausalLM",
    (EMBEDDING, *LLAMA_ATTENTION, *LLAMA_MLP, HEAD),
    uniform(_BLOCK),
    fields=(*(field for field in LLAMA_SIZES if field.ours != "norm.epsilon"), QKV_BIAS, OUTPUT_BIAS),
    fixed={**LLAMA_FIXED, "norm.type": "nonparametric", "norm.epsilon": 1e-5, "mlp.bias": False},  # both in its class
    required={"clip_qkv": None},
    parts=(RotaryPart(),),
)

_OLMO = LLAMA_COMMON + POST_NORMS + QK_NORMS
_OLMO_FIXED = {**LLAMA_FIXED, "residual.norm": "post", "attention.qk_norm": "full", "mlp.bias": False}

OLMO2 = Architecture(
    "olmo2",
    "Olmo2ForCausalLM",
    _OLMO,
    uniform(_BLOCK),
    fields=(*LLAMA_SIZES, QKV_BIAS, OUTPUT_BIAS),
    fixed=_OLMO_FIXED,
    parts=(RotaryPart(),),
)


def _newer_olmo3(model: ModelSection) -> str:
    near = near_rotary(model)
    if near and (near.base != model.attention.rotary.base or near.scaling.type != "none"):
        return "version 4 has one rotary base for all layers, and no scaling in those with a window"
    return ""


OLMO3 = Architecture(
    "olmo3",
    "Olmo3ForCausalLM",
    _OLMO,
    ByLayer({_BLOCK: ""}, ropes=True),
    fields=(*LLAMA_SIZES, QKV_BIAS, OUTPUT_BIAS),
    fixed=_OLMO_FIXED,
    buffers=(r".*rotary_emb\..*",),
    newer=_newer_olmo3,
)

# -- matrices that are joined ------------------------------------------------------------------------------------------


def _newer_phi3(model: ModelSection) -> str:
    scaled = model.attention.rotary.scaling.type != "none"
    return "version 4 refuses rotary scaling of this type" if scaled else ""


_QKV, _OUTPUT = attention.joined(f"{THEIRS}.self_attn.qkv_proj", f"{THEIRS}.self_attn.o_proj")
_GATE_UP, _DOWN = mlp.gate_up_joined(f"{THEIRS}.mlp")
PHI3 = Architecture(
    "phi3",
    "Phi3ForCausalLM",
    (EMBEDDING, _OUTPUT, _DOWN, FINAL_NORM, HEAD, *PRE_NORMS, _QKV, _GATE_UP),
    uniform(_BLOCK),
    fields=LLAMA_SIZES,
    fixed={**LLAMA_FIXED, **NO_BIAS},
    parts=(RotaryPart(partial=True), WindowPart()),
    newer=_newer_phi3,
)

# -- rotary channels that are neighbours -------------------------------------------------------------------------------

_QUERY, _KEY_VALUE, _ = INTERLEAVED_ATTENTION
_INTERLEAVED = (EMBEDDING, *INTERLEAVED_ATTENTION, FINAL_NORM, HEAD, *PRE_NORMS)
ERNIE4_5 = Architecture(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    (*_INTERLEAVED, *LLAMA_MLP),
    uniform(_BLOCK),
    fields=(*LLAMA_SIZES, HEAD_DIM, *(Field(key, "use_bias") for key in NO_BIAS)),
    fixed=LLAMA_FIXED,
    parts=(RotaryPart(),),
)

HELIUM = Architecture(
    "helium",
    "HeliumForCausalLM",
    (*_INTERLEAVED, *LLAMA_MLP),
    uniform(_BLOCK),
    fields=(*LLAMA_SIZES, HEAD_DIM, QKV_BIAS, Field("mlp.bias", "mlp_bias")),
    fixed={**LLAMA_FIXED, "attention.output_bias": False},
    parts=(RotaryPart(),),
)

GLM = Architecture(
    "glm",
    "GlmForCausalLM",
    (*_INTERLEAVED, _GATE_UP, _DOWN),
    uniform(_BLOCK),
    fields=(*LLAMA_SIZES, HEAD_DIM, QKV_BIAS),
    fixed={**LLAMA_FIXED, "attention.output_bias": False, "mlp.bias": False},
    parts=(RotaryPart(partial=True),),
)

GLM4 = Architecture(
    "glm4",
    "Glm4ForCausalLM",
    (
        *(EMBEDDING, _OUTPUT, _DOWN, FINAL_NORM, HEAD, *PRE_NORMS, _QUERY, _KEY_VALUE),
        Link(f"{OURS}.mixer_output_norm", f"{THEIRS}.post_self_attn_layernorm"),
        Link(f"{OURS}.ffn_output_norm", f"{THEIRS}.post_mlp_layernorm"),
        _GATE_UP,
    ),
    uniform(_BLOCK),
    fields=(*LLAMA_SIZES, HEAD_DIM, QKV_BIAS),
    fixed={**LLAMA_FIXED, "residual.norm": "both", "attention.output_bias": False, "mlp.bias": False},
    parts=(RotaryPart(partial=True),),
)
