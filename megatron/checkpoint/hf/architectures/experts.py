"""Attention with experts in every layer, or in most: Mixtral, Qwen's, OLMoE, ZAYA1."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from megatron.config import Config
from megatron.config.sections.model import ModelSection
from megatron.kinds.cca import hf as cca
from megatron.kinds.common.links import Link
from megatron.kinds.lightning import hf as lightning
from megatron.kinds.moe import hf as moe

from ..architecture import Architecture, Field, Found, Functions, Layers, Listed, uniform
from ..layer_types import ByLayer, RotaryPart, WindowPart, mixers_of, rope_parameters, rope_values, window_settings
from . import common

_MIXER = (common.EMBEDDING, *common.LLAMA_ATTENTION, common.FINAL_NORM, common.HEAD, *common.PRE_NORMS)
_NORMALIZE = Field("moe.router.normalize", "norm_topk_prob")


def _router(theirs: str) -> Link:
    return Link(f"{moe.OURS}.router", f"{theirs}.gate")


_MIXTRAL_MOE = f"{common.THEIRS}.block_sparse_moe"
MIXTRAL = Architecture(
    "mixtral",
    (*_MIXER, _router(_MIXTRAL_MOE), *moe.experts(f"{_MIXTRAL_MOE}.experts", "w1", "w3", "w2")),
    uniform("attention/moe"),
    fields=(*common.experts("intermediate_size", "num_local_experts"), common.HEAD_DIM),
    fixed={**common.MOE_FIXED, **common.NO_ATTENTION_BIAS, "moe.router.normalize": True},
    required={"router_jitter_noise": 0.0},
    parts=(RotaryPart(), WindowPart()),
)

# -- MiniMax-01: lightning attention in most layers, and a stream that is normed -------------------------------------

_BRANCHES = ("full_attn", "linear_attn", "mlp")


def _one_sum(theirs: PreTrainedConfig) -> Found:
    """Factors of stream (alpha) and branch (beta), which are the same for all branches here."""
    found, problems = {}, []
    for ours, factor in (("stream_multiplier", "alpha"), ("multiplier", "beta")):
        values = {float(getattr(theirs, f"{each}_{factor}_factor")) for each in _BRANCHES}
        found[f"residual.{ours}"] = max(values)
        if len(values) > 1:
            names = ", ".join(f"{each}_{factor}_factor" for each in _BRANCHES)
            problems.append(f"{names} must be equal, which is computed here, and they are {sorted(values)}")
    return found, problems


def _three_sums(config: Config) -> dict[str, Any]:
    own = config.model.residual
    factors = {"alpha": own.stream_multiplier, "beta": own.multiplier}
    return {f"{each}_{name}_factor": value for each in _BRANCHES for name, value in factors.items()}


def _listed(model: ModelSection, names: list[str]) -> dict[str, Any]:
    return {"layer_types": names}


MINIMAX = Architecture(
    "minimax",
    (
        *(*_MIXER, *lightning.mixer(f"{common.THEIRS}.self_attn"), _router(_MIXTRAL_MOE)),
        *moe.experts(f"{_MIXTRAL_MOE}.experts", "w1", "w3", "w2"),
    ),
    Layers({"lightning/moe": "linear_attention", "attention/moe": "full_attention"}, settings=_listed),
    fields=(
        *(*common.experts("intermediate_size", "num_local_experts"), common.HEAD_DIM),
        *common.fields("lightning", heads="num_attention_heads", head_dim="head_dim"),
    ),
    fixed={
        **common.MOE_FIXED,
        **{**common.NO_ATTENTION_BIAS, "residual.norm": "deepnorm", "moe.router.normalize": True},
        "lightning.norm_epsilon": 1e-6,  # a constant of their class
    },
    required={"router_jitter_noise": 0.0, "sliding_window": None, "hidden_act": "silu"},
    parts=(RotaryPart(), Functions(_one_sum, _three_sums)),
    buffers=(r".*rotary_emb\.inv_freq", r".*\.self_attn\.(slope_rate|(query|key|diagonal)_decay)"),
)

MINIMAX_M2 = Architecture(
    "minimax_m2",
    (
        *(*_MIXER, *common.QK_NORMS, _router(_MIXTRAL_MOE)),
        *moe.experts(f"{_MIXTRAL_MOE}.experts", "w1", "w3", "w2"),
        Link(f"{moe.OURS}.router.correction", f"{_MIXTRAL_MOE}.e_score_correction_bias", suffixes=("",)),
    ),
    uniform("attention/moe"),
    fields=(*common.experts("intermediate_size", "num_local_experts"), common.HEAD_DIM),
    fixed={
        **common.MOE_FIXED,
        **{**common.NO_ATTENTION_BIAS, "attention.qk_norm": "full"},
        **common.options("moe.router", score="sigmoid", correction="sign", normalize=True),
    },
    required={"router_jitter_noise": 0.0},
    parts=(RotaryPart(partial=True),),
    newer=lambda model: "version 4 does not have the class",
)

MLP_MOE = (_router(f"{common.THEIRS}.mlp"), *moe.experts(f"{common.THEIRS}.mlp.experts"))
OLMOE = Architecture(
    "olmoe",
    (*_MIXER, *common.QK_NORMS, *MLP_MOE),
    uniform("attention/moe"),
    fields=(*common.experts("intermediate_size", "num_experts"), _NORMALIZE, *common.ATTENTION_BIASES),
    fixed={**common.MOE_FIXED, "attention.qk_norm": "full"},
    required={"clip_qkv": None},
    parts=(RotaryPart(),),
)

# -- GPT-OSS: sinks, windows in some layers, experts with biases -------------------------------------------------------

GPT_OSS = Architecture(
    "gpt_oss",
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


def sparse(theirs: PreTrainedConfig) -> list[str]:
    """The kind of each layer's feed-forward network, an MLP ("dense") or experts."""
    dense = set(theirs.mlp_only_layers or ())
    return [
        "dense" if index in dense or (index + 1) % theirs.decoder_sparse_step else "sparse"
        for index in range(theirs.num_hidden_layers)
    ]


def sparse_settings(_model: ModelSection, kinds: list[str]) -> dict[str, Any]:
    """Their settings, from "dense" or "sparse" for each layer."""
    return {"decoder_sparse_step": 1, "mlp_only_layers": [index for index, kind in enumerate(kinds) if kind == "dense"]}


_SPARSE = Listed({"attention/moe": "sparse", "attention/mlp": "dense"}, settings=sparse_settings, listed=sparse)
QWEN = (
    *common.experts("moe_intermediate_size", "num_experts"),
    _NORMALIZE,
    Field("mlp.hidden_size", "intermediate_size"),
    common.activation("hidden_act"),
)
SHARED = moe.shared(f"{common.THEIRS}.mlp.shared_expert", f"{common.THEIRS}.mlp.shared_expert_gate")
SHARED_SIZE = Field("moe.shared_size", "shared_expert_intermediate_size")
_QWEN_FIXED = {**common.MOE_FIXED, **common.options("mlp", gated=True, bias=False)}

QWEN2_MOE = Architecture(
    "qwen2_moe",
    (*_MIXER, *MLP_MOE, *common.LLAMA_MLP, *SHARED),
    _SPARSE,
    fields=(*QWEN, SHARED_SIZE, Field("attention.qkv_bias", "qkv_bias")),
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
    (*_MIXER, *common.QK_NORMS, *MLP_MOE, *common.LLAMA_MLP),
    _SPARSE,
    fields=(*QWEN, Field("attention.head_dim", "head_dim", optional=True), *common.ATTENTION_BIASES),
    fixed={**_QWEN_FIXED, "attention.qk_norm": "head"},
    required={"use_sliding_window": False},
    parts=(RotaryPart(),),
    older=lambda settings: {"num_experts": settings["num_local_experts"]},  # without it version 4 makes 128
)


# -- ZAYA1: compressed convolutional attention, routers that pass on a state, and scaled residuals ---------------------

_FULL, _SLIDING = "hybrid", "hybrid_sliding"
_SCALES = {
    "branch_scale": "hidden_states_scale",
    "branch_shift": "hidden_states_bias",
    "stream_scale": "residual_scale",
    "stream_shift": "residual_bias",
}


def _scales(ours: str, theirs: str) -> tuple[Link, ...]:
    return tuple(
        Link(f"{common.OURS}.{ours}.{mine}", f"{common.THEIRS}.{theirs}.{each}", suffixes=("",))
        for mine, each in _SCALES.items()
    )


_ZAYA_LINKS = (
    common.EMBEDDING,
    Link("embedding.scale", "model.input_hidden_states_scale", suffixes=("",)),
    Link("embedding.shift", "model.input_hidden_states_bias", suffixes=("",)),
    Link(f"{common.OURS}.mixer_norm", f"{common.THEIRS}.input_layernorm"),
    *cca.mixer(f"{common.THEIRS}.self_attn"),
    *_scales("mixer_joint", "post_attention_residual_scale"),
    Link(f"{common.OURS}.ffn_norm", f"{common.THEIRS}.post_attention_layernorm"),
    *moe.network_router(f"{common.THEIRS}.mlp.gate"),
    *moe.experts_as_one(f"{common.THEIRS}.mlp.experts"),
    *_scales("ffn_joint", "post_mlp_residual_scale"),
    common.FINAL_NORM,
    common.HEAD,
)

_ZAYA_FIELDS = (
    *(
        *common.STREAM,
        common.TIED,
        common.rms_norm(),
        Field("head.bias", "lm_head_bias"),
        common.activation("hidden_act", "moe"),
    ),
    *common.fields("cca", heads="num_attention_heads", kv_heads="num_key_value_heads", head_dim="head_dim"),
    *common.fields(
        "cca", qkv_bias="attention_bias", output_bias="attention_bias", depthwise="cca_time0", grouped="cca_time1"
    ),
    *common.fields("moe", experts="num_experts", top_k="num_experts_per_tok", hidden_size="moe_intermediate_size"),
    Field("moe.router.width", "router_hidden_size"),
)
_ZAYA_FIXED = {
    **{**common.BARE, **common.options("residual", form="sequential", channel_scales=True)},
    **common.options("cca", position="rotary", temperature="linear"),
    **{**common.EXPERTS_FIXED, "moe.shared_size": 0},
    **common.options("moe.router", network="mlp", skip=True, normalize=False, scale=1.0, groups=1, correction="sign"),
}
del _ZAYA_FIXED["moe.router.bias"]


@dataclass(frozen=True)
class _Zaya(Layers):
    """The first layer's router has no previous state. Layers with a window have their own rotary options."""

    def pattern(self, theirs: PreTrainedConfig) -> str:
        mixers = ["cca@sliding" if each == _SLIDING else "cca" for each in theirs.layer_types]
        if len(set(mixers)) == 1 and len(mixers) > 1:
            return f"{mixers[0]}/moe@first ({mixers[0]}/moe) x{len(mixers) - 1}"
        return " ".join(f"{mixer}/moe{'' if number else '@first'}" for number, mixer in enumerate(mixers))


def _zaya_values(theirs: PreTrainedConfig) -> Found:
    """Its stream is always fp32, without an option."""
    rotary, problems = rope_values(theirs.rope_parameters[_FULL], partial=True)
    variants: dict[str, Any] = {"first": {"router": {"average": False}}}
    if _SLIDING in theirs.layer_types:
        near, found = rope_values(theirs.rope_parameters[_SLIDING], partial=True)
        variants["sliding"] = {"window": theirs.sliding_window, "rotary": near}
        problems += found
    return {"cca.rotary": rotary, "variants": variants, "residual.fp32": True}, problems


def _zaya_settings(model: ModelSection, kinds: list[str]) -> dict[str, Any]:
    mixers = mixers_of(model)
    kinds = [_FULL if each.window is None else _SLIDING for each in mixers]
    rotary = {kind: each.rotary for kind, each in zip(reversed(kinds), reversed(mixers))}
    ropes = {kind: rope_parameters(rotary.get(kind, model.cca.rotary), partial=True) for kind in (_FULL, _SLIDING)}
    return {**window_settings(mixers), "layer_types": kinds, "rope_parameters": ropes}


ZAYA = Architecture(
    "zaya",
    _ZAYA_LINKS,
    _Zaya({"cca/moe": _FULL}, _zaya_values, _zaya_settings),
    fields=_ZAYA_FIELDS,
    fixed=_ZAYA_FIXED,
    newer=lambda model: "version 4 does not have the class",
)
