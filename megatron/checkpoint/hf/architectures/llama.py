"""Architectures of Llama's kind: rotary attention and a gated MLP in every layer."""

from __future__ import annotations

from dataclasses import replace

from megatron.config.sections.model import ModelSection
from megatron.kinds.attention import hf as attention
from megatron.kinds.common.links import Link
from megatron.kinds.mlp import hf as mlp

from ..architecture import Field, Power
from ..layer_types import ByLayer, near_rotary, windowed
from ..parts import RotaryPart, WindowPart
from . import common

_BLOCK = "attention/mlp"
_BIASES = (*common.ATTENTION_BIASES, common.MLP_BIAS)
_QKV_ONLY = {"attention.output_bias": False, "mlp.bias": False}

LLAMA = common.dense("llama", "LlamaForCausalLM", common.LLAMA_LINKS, more=(common.HEAD_DIM, *_BIASES))

MISTRAL = common.dense(
    "mistral",
    "MistralForCausalLM",
    common.LLAMA_LINKS,
    more=(common.HEAD_DIM,),
    fixed=common.NO_BIAS,
    parts=(RotaryPart(), WindowPart()),
)

QWEN2 = common.dense(
    "qwen2", "Qwen2ForCausalLM", common.LLAMA_LINKS, windowed(_BLOCK), fixed={"attention.qkv_bias": True, **_QKV_ONLY}
)

QWEN3 = common.dense(
    "qwen3",
    "Qwen3ForCausalLM",
    common.LLAMA_LINKS + common.QK_NORMS,
    windowed(_BLOCK),
    more=(common.HEAD_DIM, *common.ATTENTION_BIASES),
    fixed={"attention.qk_norm": "head", "mlp.bias": False},
)

SMOLLM3 = common.dense(
    "smollm3", "SmolLM3ForCausalLM", common.LLAMA_LINKS, ByLayer({_BLOCK: ""}, unturned=True), more=_BIASES
)

SEED_OSS = common.dense(
    "seed_oss",
    "SeedOssForCausalLM",
    common.LLAMA_LINKS,
    more=(common.HEAD_DIM, common.QKV_BIAS, Field("attention.output_bias", "attention_out_bias"), common.MLP_BIAS),
)

_UNGATED = mlp.plain(f"{common.THEIRS}.mlp.up_proj", f"{common.THEIRS}.mlp.down_proj")
ARCEE = common.dense(
    "arcee",
    "ArceeForCausalLM",
    (common.EMBEDDING, *common.LLAMA_ATTENTION, *_UNGATED, common.FINAL_NORM, common.HEAD, *common.PRE_NORMS),
    more=(common.HEAD_DIM, *_BIASES),
    fixed={"mlp.gated": False},
)

GRANITE = common.dense(
    "granite",
    "GraniteForCausalLM",
    common.LLAMA_LINKS,
    more=(
        *_BIASES,
        Field("embedding.multiplier", "embedding_multiplier"),
        Field("residual.multiplier", "residual_multiplier"),
        Field("attention.scale", "attention_multiplier"),
        Power("head.multiplier", "logits_scaling"),
    ),
)

# -- OLMo --------------------------------------------------------------------------------------------------------------

_OLMO = common.dense(
    "olmo",
    "OlmoForCausalLM",
    (common.EMBEDDING, *common.LLAMA_ATTENTION, *common.LLAMA_MLP, common.HEAD),
    more=common.ATTENTION_BIASES,
    fixed={**common.options("norm", type="nonparametric", epsilon=1e-5), "mlp.bias": False},  # both in its class
    required={"clip_qkv": None},
)
OLMO = replace(_OLMO, fields=tuple(field for field in _OLMO.fields if field.ours != "norm.epsilon"))

OLMO2 = common.dense(
    "olmo2",
    "Olmo2ForCausalLM",
    common.LLAMA_COMMON + common.POST_NORMS + common.QK_NORMS,
    more=common.ATTENTION_BIASES,
    fixed={"residual.norm": "post", "attention.qk_norm": "full", "mlp.bias": False},
)


def _newer_olmo3(model: ModelSection) -> str:
    near = near_rotary(model)
    if near and (near.base != model.attention.rotary.base or near.scaling.type != "none"):
        return "version 4 has one rotary base for all layers, and no scaling in layers with a window"
    return ""


OLMO3 = replace(
    OLMO2,
    name="olmo3",
    class_name="Olmo3ForCausalLM",
    layers=ByLayer({_BLOCK: ""}, ropes=True),
    parts=(),
    buffers=(r".*rotary_emb\..*",),
    newer=_newer_olmo3,
)

# -- matrices that are joined ------------------------------------------------------------------------------------------


def _newer_phi3(model: ModelSection) -> str:
    scaled = model.attention.rotary.scaling.type != "none"
    return "version 4 refuses rotary scaling of this type" if scaled else ""


_QKV, _OUTPUT = attention.joined(f"{common.THEIRS}.self_attn.qkv_proj", f"{common.THEIRS}.self_attn.o_proj")
_GATE_UP, _DOWN = mlp.gate_up_joined(f"{common.THEIRS}.mlp")
PHI3 = common.dense(
    "phi3",
    "Phi3ForCausalLM",
    (common.EMBEDDING, _OUTPUT, _DOWN, common.FINAL_NORM, common.HEAD, *common.PRE_NORMS, _QKV, _GATE_UP),
    fixed=common.NO_BIAS,
    parts=(RotaryPart(partial=True), WindowPart()),
    newer=_newer_phi3,
)

# -- rotary channels that are neighbours -------------------------------------------------------------------------------

_QUERY, _KEY_VALUE, _ = common.INTERLEAVED_ATTENTION
_INTERLEAVED = (common.EMBEDDING, *common.INTERLEAVED_ATTENTION, common.FINAL_NORM, common.HEAD, *common.PRE_NORMS)
ERNIE4_5 = common.dense(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    (*_INTERLEAVED, *common.LLAMA_MLP),
    more=(common.HEAD_DIM, *(Field(key, "use_bias") for key in common.NO_BIAS)),
)

HELIUM = common.dense(
    "helium",
    "HeliumForCausalLM",
    (*_INTERLEAVED, *common.LLAMA_MLP),
    more=(common.HEAD_DIM, common.QKV_BIAS, common.MLP_BIAS),
    fixed={"attention.output_bias": False},
)

GLM = common.dense(
    "glm",
    "GlmForCausalLM",
    (*_INTERLEAVED, _GATE_UP, _DOWN),
    more=(common.HEAD_DIM, common.QKV_BIAS),
    fixed=_QKV_ONLY,
    parts=(RotaryPart(partial=True),),
)

GLM4 = common.dense(
    "glm4",
    "Glm4ForCausalLM",
    (
        *(common.EMBEDDING, _OUTPUT, _DOWN, common.FINAL_NORM, common.HEAD, *common.PRE_NORMS, _QUERY, _KEY_VALUE),
        Link(f"{common.OURS}.mixer_output_norm", f"{common.THEIRS}.post_self_attn_layernorm"),
        Link(f"{common.OURS}.ffn_output_norm", f"{common.THEIRS}.post_mlp_layernorm"),
        _GATE_UP,
    ),
    more=(common.HEAD_DIM, common.QKV_BIAS),
    fixed={"residual.norm": "both", **_QKV_ONLY},
    parts=(RotaryPart(partial=True),),
)
