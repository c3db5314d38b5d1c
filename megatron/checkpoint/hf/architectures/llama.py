"""Architectures of Llama's kind: rotary attention and a gated MLP in every layer, or in most."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from megatron.config.sections.model import ModelSection
from megatron.kinds.attention import hf as attention
from megatron.kinds.common.links import Link
from megatron.kinds.gated_delta import hf as gated_delta
from megatron.kinds.mlp import hf as mlp

from ..architecture import Architecture, Field, Found, Layers, Power, numbers_of
from ..layer_types import ByLayer, RotaryPart, WindowPart, near_rotary, rope_parameters, rope_values, windowed
from . import common

_BLOCK = "attention/mlp"
_BIASES = (*common.ATTENTION_BIASES, common.MLP_BIAS)
_QKV_ONLY = {"attention.output_bias": False, "mlp.bias": False}

LLAMA = common.dense("llama", common.LLAMA_LINKS, more=(common.HEAD_DIM, *_BIASES))

MISTRAL = common.dense(
    "mistral", common.LLAMA_LINKS, more=(common.HEAD_DIM,), fixed=common.NO_BIAS, parts=(RotaryPart(), WindowPart())
)

QWEN2 = common.dense("qwen2", common.LLAMA_LINKS, windowed(_BLOCK), fixed={"attention.qkv_bias": True, **_QKV_ONLY})

QWEN3 = common.dense(
    "qwen3",
    common.LLAMA_LINKS + common.QK_NORMS,
    windowed(_BLOCK),
    more=(common.HEAD_DIM, *common.ATTENTION_BIASES),
    fixed={"attention.qk_norm": "head", "mlp.bias": False},
)

SMOLLM3 = common.dense("smollm3", common.LLAMA_LINKS, ByLayer({_BLOCK: ""}, unturned=True), more=_BIASES)

SEED_OSS = common.dense(
    "seed_oss",
    common.LLAMA_LINKS,
    more=(common.HEAD_DIM, common.QKV_BIAS, Field("attention.output_bias", "attention_out_bias"), common.MLP_BIAS),
)

_ACT_FN = f"{common.THEIRS}.mlp.act_fn"
_UNGATED = mlp.plain(f"{common.THEIRS}.mlp.up_proj", f"{common.THEIRS}.mlp.down_proj")
ARCEE = common.dense(
    "arcee",
    (common.EMBEDDING, *common.LLAMA_ATTENTION, *_UNGATED, common.FINAL_NORM, common.HEAD, *common.PRE_NORMS),
    more=(common.HEAD_DIM, *_BIASES),
    fixed={"mlp.gated": False},
)

_APERTUS = common.dense(
    "apertus",
    (
        *(common.EMBEDDING, *common.LLAMA_ATTENTION, *common.QK_NORMS, *_UNGATED, common.FINAL_NORM, common.HEAD),
        *(*common.norms("attention_layernorm", "feedforward_layernorm"), *mlp.trained_curve(_ACT_FN)),
    ),
    more=(Field("attention.head_dim", "head_dim", optional=True), *common.ATTENTION_BIASES),
    fixed={"attention.qk_norm": "head", **common.options("mlp", gated=False, bias=False)},
)
_CURVE = Field("mlp.activation", "hidden_act", {**common.ACTIVATIONS, "xielu": "xielu"}, common.ALSO)
APERTUS = replace(_APERTUS, fields=(*(each for each in _APERTUS.fields if each.ours != _CURVE.ours), _CURVE))

GRANITE = common.dense(
    "granite",
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
    (common.EMBEDDING, *common.LLAMA_ATTENTION, *common.LLAMA_MLP, common.HEAD),
    more=common.ATTENTION_BIASES,
    fixed={**common.options("norm", type="nonparametric", epsilon=1e-5), "mlp.bias": False},  # both in its class
    required={"clip_qkv": None},
)
OLMO = replace(_OLMO, fields=tuple(field for field in _OLMO.fields if field.ours != "norm.epsilon"))

OLMO2 = common.dense(
    "olmo2",
    common.LLAMA_COMMON + common.POST_NORMS + common.QK_NORMS,
    more=common.ATTENTION_BIASES,
    fixed={"residual.norm": "post", "attention.qk_norm": "full", "mlp.bias": False},
)


def _newer_olmo3(model: ModelSection) -> str:
    near = near_rotary(model)
    if near and (near.base != model.attention.rotary.base or near.scaling.type != "none"):
        return "version 4 has one rotary base for all layers, and no scaling in layers with a window"
    return ""


OLMO3 = replace(OLMO2, name="olmo3", layers=ByLayer({_BLOCK: ""}, ropes=True), parts=(), newer=_newer_olmo3)

# -- matrices that are joined ------------------------------------------------------------------------------------------


def _newer_phi3(model: ModelSection) -> str:
    scaled = model.attention.rotary.scaling.type != "none"
    return "version 4 refuses rotary scaling of this type" if scaled else ""


_QKV, _OUTPUT = attention.joined(f"{common.THEIRS}.self_attn.qkv_proj", f"{common.THEIRS}.self_attn.o_proj")
_GATE_UP, _DOWN = mlp.gate_up_joined(f"{common.THEIRS}.mlp")
PHI3 = common.dense(
    "phi3",
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
    (*_INTERLEAVED, *common.LLAMA_MLP),
    more=(common.HEAD_DIM, *(Field(key, "use_bias") for key in common.NO_BIAS)),
)

HELIUM = common.dense(
    "helium",
    (*_INTERLEAVED, *common.LLAMA_MLP),
    more=(common.HEAD_DIM, common.QKV_BIAS, common.MLP_BIAS),
    fixed={"attention.output_bias": False},
)

GLM = common.dense(
    "glm",
    (*_INTERLEAVED, _GATE_UP, _DOWN),
    more=(common.HEAD_DIM, common.QKV_BIAS),
    fixed=_QKV_ONLY,
    parts=(RotaryPart(partial=True),),
)

GLM4 = common.dense(
    "glm4",
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


# -- OLMo Hybrid: Gated DeltaNet or attention, each with an MLP --------------------------------------------------------

_DELTA = "gated_delta"
_DELTA_OPTIONS = (
    *common.fields(
        _DELTA, heads="linear_num_value_heads", key_heads="linear_num_key_heads", key_dim="linear_key_head_dim"
    ),
    *common.fields(_DELTA, value_dim="linear_value_head_dim", convolution="linear_conv_kernel_dim"),
    *common.fields(_DELTA, negative_eigenvalues="linear_allow_neg_eigval"),
    *common.fields(_DELTA, decay_low="linear_a_log_min", decay_high="linear_a_log_max"),
    *common.fields(_DELTA, time_step_low="linear_dt_min", time_step_high="linear_dt_max"),
    *common.fields(_DELTA, time_step_floor="linear_dt_init_floor"),
)


def _hybrid_values(theirs: PreTrainedConfig) -> Found:
    parameters = theirs.rope_parameters or {}
    if parameters.get("rope_theta") is None:
        return {"attention.position": "none"}, []
    rotary, problems = rope_values(parameters, partial=False)
    return {"attention.position": "rotary", "attention.rotary": rotary}, problems


def _hybrid_settings(model: ModelSection, kinds: list[str]) -> dict[str, Any]:
    turned = model.attention.position == "rotary"
    nothing = {"rope_type": "default", "rope_theta": None}
    return {
        "layer_types": kinds,
        "rope_parameters": rope_parameters(model.attention.rotary, partial=False) if turned else nothing,
    }


def _hybrid_links(ours: Collection[str]) -> tuple[Link, ...]:
    """transformers has one name for the norm after a mixer: the mixer's own (attention), or the MLP's."""
    links: list[Link] = []
    for layer in numbers_of(ours):
        mine, theirs = f"layers.{layer}", f"model.layers.{layer}"
        if f"{mine}.gated_delta.A_log" in ours:
            links += [
                Link(f"{mine}.mixer_norm", f"{theirs}.attention_layer_norm"),
                Link(f"{mine}.ffn_norm", f"{theirs}.feedforward_layer_norm"),
                *gated_delta.mixer(f"{mine}.gated_delta", f"{theirs}.linear_attn"),
            ]
        else:
            links += [
                Link(f"{mine}.mixer_norm", f"{theirs}.feedforward_layer_norm"),
                Link(f"{mine}.ffn_norm", f"{theirs}.post_feedforward_layernorm"),
            ]
    return tuple(links)


OLMO_HYBRID = Architecture(
    "olmo_hybrid",
    common.LLAMA_COMMON + common.QK_NORMS,
    Layers(
        {"gated_delta/mlp": "linear_attention", "attention/mlp": "full_attention"},
        _hybrid_values,
        _hybrid_settings,
        _hybrid_links,
    ),
    fields=(*(*common.LLAMA_SIZES, *common.ATTENTION_BIASES, *_DELTA_OPTIONS),),
    fixed={
        **{key: value for key, value in common.LLAMA_FIXED.items() if key != "attention.position"},
        "residual.norm": "hybrid",
        "attention.qk_norm": "full",
        "mlp.bias": False,
        "gated_delta.convolution_bias": False,
        "gated_delta.norm_epsilon": 1e-5,  # a constant of their class
    },
    required={"hidden_act": "silu"},
    renamed=(
        (r"\binput_layernorm\b", "attention_layer_norm"),
        (r"\bpost_attention_layernorm\b", "feedforward_layer_norm"),
    ),
    newer=lambda model: "version 4 does not have the class",
)
