"""Mamba, Mamba-2, and hybrids of them with attention: Bamba, Jamba, Falcon-H1 and Nemotron-H."""

import math
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from megatron.config import Config
from megatron.config.sections.model import ModelSection
from megatron.kinds.attention import hf as attention
from megatron.kinds.common.links import Link
from megatron.kinds.mamba import hf as mamba
from megatron.kinds.mamba.options import inner_channels
from megatron.kinds.mlp import hf as mlp
from megatron.kinds.moe import hf as moe

from ..architecture import Architecture, Field, Found, Functions, Layers, uniform, unlimited
from ..layer_types import RotaryPart
from . import common
from .deepseek import V3_FIELDS, V3_ROUTER

_THEIRS = "backbone.layers.{n}"
_COMMON = (
    Link("embedding.tokens", "backbone.embeddings"),
    Link(f"{common.OURS}.mixer_norm", f"{_THEIRS}.norm"),
    Link("final_norm", "backbone.norm_f"),
    common.HEAD,
)


def _state_space(kind: str) -> tuple[Field, ...]:
    """Options with the same names for Mamba and Mamba-2, including initial values."""
    return (
        *(
            *common.STREAM,
            common.TIED,
            common.rms_norm("layer_norm_epsilon"),
            Field("residual.fp32", "residual_in_fp32"),
        ),
        *common.fields(kind, expand="expand", state_size="state_size", convolution="conv_kernel"),
        *common.fields(kind, convolution_bias="use_conv_bias", bias="use_bias"),
        *common.fields(kind, **STEPS),
    )


NO_STEP = 1e-30  # their limit where we have none: they take its logarithm, and a default for 0
STEPS = {"time_step_low": "time_step_min", "time_step_high": "time_step_max", "time_step_floor": "time_step_floor"}


MAMBA = Architecture(
    "mamba",
    (*_COMMON, *mamba.mixer(f"{_THEIRS}.mixer")),
    uniform("mamba"),
    fields=(*_state_space("mamba"), Field("mamba.rank", "time_step_rank")),
    fixed=common.BARE,
    required={"hidden_act": "silu"},
    prefix="backbone.",
    buffers=(),
)


def read_steps(theirs: PreTrainedConfig) -> Found:
    """The limits of Mamba-2's time steps."""
    least, most = theirs.time_step_limit
    return {"mamba2.least_step": float(least), "mamba2.most_step": None if unlimited(most) else float(most)}, []


def write_steps(model: ModelSection) -> dict[str, Any]:
    own = model.mamba2
    return {"time_step_limit": (own.least_step, math.inf if own.most_step is None else own.most_step)}


def heads(model: ModelSection) -> int:
    """Heads of a Mamba-2 layer."""
    return inner_channels(model.mamba2, model.hidden_size) // model.mamba2.head_dim


def _newer_groups(model: ModelSection) -> str:
    grouped = model.mamba2.groups > 1
    return "version 4 norms the groups of Mamba-2 as one and gives other logits" if grouped else ""


MAMBA2 = Architecture(
    "mamba2",
    (*_COMMON, *mamba.mixer2(f"{_THEIRS}.mixer")),
    uniform("mamba2"),
    fields=(*_state_space("mamba2"), Field("mamba2.groups", "n_groups"), Field("mamba2.head_dim", "head_dim")),
    fixed=common.BARE,
    required={"hidden_act": "silu"},
    parts=(Functions(read_steps, lambda config: {"num_heads": heads(config.model), **write_steps(config.model)}),),
    prefix="backbone.",
    buffers=(),
    newer=_newer_groups,
)

# -- Bamba: Mamba-2 or attention, each with an MLP ---------------------------------------------------------------------

MAMBA2_SIZES = (
    *common.fields("mamba2", expand="mamba_expand", state_size="mamba_d_state", convolution="mamba_d_conv"),
    *common.fields("mamba2", groups="mamba_n_groups", convolution_bias="mamba_conv_bias", bias="mamba_proj_bias"),
)


def _bamba_values(theirs: PreTrainedConfig) -> Found:
    values, problems = read_steps(theirs)
    return {"mamba2.head_dim": theirs.mamba_d_head, **values}, problems


def _bamba_settings(model: ModelSection, kinds: list[str]) -> dict[str, Any]:
    return {
        "attn_layer_indices": [index for index, kind in enumerate(kinds) if kind == "full_attention"],
        "mamba_n_heads": heads(model),
        "mamba_d_head": model.mamba2.head_dim,
        **write_steps(model),
    }


def newer_limits(model: ModelSection) -> str:
    """Why version 4 gives other logits for limits of time steps. Empty without limits."""
    limited = model.mamba2.least_step > 0.0 or model.mamba2.most_step is not None
    return "version 4 does not limit the time steps and gives other logits" if limited else ""


BAMBA = common.dense(
    "bamba",
    (
        common.EMBEDDING,
        Link("final_norm", "model.final_layernorm"),
        common.HEAD,
        Link(f"{common.OURS}.mixer_norm", f"{common.THEIRS}.input_layernorm"),
        *mamba.mixer2(f"{common.THEIRS}.mamba"),
        Link(f"{common.OURS}.ffn_norm", f"{common.THEIRS}.pre_ff_layernorm"),
        *common.LLAMA_ATTENTION,
        *mlp.gated(f"{common.THEIRS}.feed_forward"),
    ),
    Layers({"mamba2/mlp": "linear_attention", "attention/mlp": "full_attention"}, _bamba_values, _bamba_settings),
    more=(*common.ATTENTION_BIASES, common.MLP_BIAS, *MAMBA2_SIZES),
    required={"hidden_act": "silu"},
    parts=(RotaryPart(partial=True),),
    newer=lambda model: _newer_groups(model) or newer_limits(model),
)


# -- Jamba: Mamba or attention, each with an MLP or with experts, at regular distances ---------------------------------

MAMBA_SIZES = (
    *common.fields("mamba", expand="mamba_expand", state_size="mamba_d_state", convolution="mamba_d_conv"),
    *common.fields("mamba", rank="mamba_dt_rank", convolution_bias="mamba_conv_bias", bias="mamba_proj_bias"),
)


@dataclass(frozen=True)
class _Jamba(Layers):
    def pattern(self, theirs: PreTrainedConfig) -> str:
        mixers = ("attention" if each == "attention" else "mamba" for each in theirs.layers_block_type)
        ffns = ("moe" if experts > 1 else "mlp" for experts in theirs.layers_num_experts)
        return " ".join(f"{mixer}/{ffn}" for mixer, ffn in zip(mixers, ffns))


def _jamba_settings(model: ModelSection, kinds: list[str]) -> dict[str, Any]:
    blocks = model.blocks
    attention = _every([block.mixer is not None and block.mixer.name == "attention" for block in blocks])
    experts = _every([block.ffn is not None and block.ffn.name == "moe" for block in blocks])
    return {
        "attn_layer_period": attention[0],
        "attn_layer_offset": attention[1],
        "expert_layer_period": experts[0],
        "expert_layer_offset": experts[1],
    }


def _every(chosen: list[bool]) -> tuple[int, int]:
    """Period and offset of the chosen layers, or of none if they are irregular. Reading back then shows it."""
    for period in range(1, len(chosen) + 2):
        for offset in range(period):
            if all((index % period == offset) == each for index, each in enumerate(chosen)):
                return period, offset
    return len(chosen) + 1, len(chosen)


JAMBA = Architecture(
    "jamba",
    (
        common.EMBEDDING,
        Link(f"{common.OURS}.mixer_norm", f"{common.THEIRS}.input_layernorm"),
        *common.LLAMA_ATTENTION,
        *mamba.inner_norms(f"{common.THEIRS}.mamba"),
        *mamba.mixer(f"{common.THEIRS}.mamba"),
        Link(f"{common.OURS}.ffn_norm", f"{common.THEIRS}.pre_ff_layernorm"),
        *mlp.gated(f"{common.THEIRS}.feed_forward"),
        Link(f"{common.OURS}.moe.router", f"{common.THEIRS}.feed_forward.router"),
        *moe.experts(f"{common.THEIRS}.feed_forward.experts"),
        Link("final_norm", "model.final_layernorm"),
        common.HEAD,
    ),
    _Jamba(
        dict.fromkeys(("mamba/moe", "mamba/mlp", "attention/mlp", "attention/moe"), ""),
        settings=_jamba_settings,
        needed=("mamba/moe", "mamba/mlp"),
    ),
    fields=(
        *common.experts("intermediate_size", "num_experts"),
        Field("mlp.hidden_size", "intermediate_size"),
        *MAMBA_SIZES,
        common.activation("hidden_act"),
    ),
    fixed={
        **{**common.MOE_FIXED, **common.NO_BIAS},
        "attention.position": "none",
        "moe.router.normalize": False,
        "mlp.gated": True,
        **common.options("mamba", heads=1, inner_norms=True),
    },
    required={"hidden_act": "silu"},
)


# -- Falcon-H1: attention and Mamba-2 in parallel in each layer, with multipliers throughout the model -----------------

_FALCON_PARTS = ("z", "x", "B", "C", "dt")  # of Mamba-2's first projection, in the order of their list


def _read_falcon(theirs: PreTrainedConfig) -> Found:
    inner = theirs.mamba_d_ssm or theirs.mamba_expand * theirs.hidden_size
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    placed = "before_gate" if theirs.mamba_norm_before_gate else "after_gate"
    gate, down = theirs.mlp_multipliers
    values, problems = read_steps(theirs)
    if theirs.mamba_proj_bias != theirs.projectors_bias:
        problems.append("mamba_proj_bias and projectors_bias must be equal: both projections have a bias here or none")
    return {
        **values,
        "attention.scale": head_dim**-0.5 * theirs.key_multiplier,
        "mamba2.inner_size": None if inner == theirs.mamba_expand * theirs.hidden_size else inner,
        "mamba2.head_dim": inner // theirs.mamba_n_heads,
        "mamba2.norm": placed if theirs.mamba_rms_norm else "none",
        **{f"mamba2.multipliers.{part}": float(each) for part, each in zip(_FALCON_PARTS, theirs.ssm_multipliers)},
        "mlp.gate_multiplier": float(gate),
        "mlp.output_multiplier": float(down),
    }, problems


def _write_falcon(config: Config) -> dict[str, Any]:
    model: ModelSection = config.model
    own, attention = model.mamba2, model.attention
    return {
        "key_multiplier": attention.scale / attention.head_dim**-0.5,
        "mamba_d_ssm": inner_channels(own, model.hidden_size),
        "mamba_n_heads": heads(model),
        "mamba_d_head": own.head_dim,
        "mamba_rms_norm": own.norm != "none",
        "mamba_norm_before_gate": own.norm == "before_gate",
        "projectors_bias": own.bias,
        "ssm_multipliers": [getattr(own.multipliers, part) for part in _FALCON_PARTS],
        "mlp_multipliers": [model.mlp.gate_multiplier, model.mlp.output_multiplier],
        **write_steps(model),
    }


FALCON_H1 = common.dense(
    "falcon_h1",
    (
        common.EMBEDDING,
        *common.norms("input_layernorm", "pre_ff_layernorm"),
        *common.LLAMA_ATTENTION,
        *mamba.mixer2(f"{common.THEIRS}.mamba"),
        *mlp.gated(f"{common.THEIRS}.feed_forward"),
        Link("final_norm", "model.final_layernorm"),
        common.HEAD,
    ),
    uniform("attention&mamba2/mlp"),
    more=(
        *(*common.ATTENTION_BIASES, common.MLP_BIAS, *MAMBA2_SIZES),
        Field("attention.head_dim", "head_dim", optional=True),
        *common.fields(
            "attention", input_multiplier="attention_in_multiplier", output_multiplier="attention_out_multiplier"
        ),
        *common.fields("mamba2", input_multiplier="ssm_in_multiplier", output_multiplier="ssm_out_multiplier"),
        Field("embedding.multiplier", "embedding_multiplier"),
        Field("head.multiplier", "lm_head_multiplier"),
    ),
    required={"hidden_act": "silu"},
    parts=(RotaryPart(), Functions(_read_falcon, _write_falcon)),
    newer=newer_limits,
)


# -- Nemotron-H: Mamba-2, attention without positions, an MLP or experts, each as a layer of its own -------------------

_NEMOTRON_LAYER = "backbone.layers.{n}"
_NEMOTRON_MIXER = f"{_NEMOTRON_LAYER}.mixer"

_NEMOTRON_LINKS = (
    Link("embedding.tokens", "backbone.embeddings"),
    Link(f"{common.OURS}.mixer_norm", f"{_NEMOTRON_LAYER}.norm"),
    Link(f"{common.OURS}.ffn_norm", f"{_NEMOTRON_LAYER}.norm"),
    *mamba.mixer2(_NEMOTRON_MIXER),
    *attention.separate(_NEMOTRON_MIXER),
    *mlp.plain(f"{_NEMOTRON_MIXER}.up_proj", f"{_NEMOTRON_MIXER}.down_proj"),
    Link(f"{moe.OURS}.router", f"{_NEMOTRON_MIXER}.gate", suffixes=("weight",)),
    Link(f"{moe.OURS}.router.correction", f"{_NEMOTRON_MIXER}.gate.e_score_correction_bias", suffixes=("",)),
    *moe.plain_experts(f"{_NEMOTRON_MIXER}.experts"),
    Link(f"{moe.OURS}.latent_down", f"{_NEMOTRON_MIXER}.fc1_latent_proj", suffixes=("weight",)),
    Link(f"{moe.OURS}.latent_up", f"{_NEMOTRON_MIXER}.fc2_latent_proj", suffixes=("weight",)),
    Link(f"{moe.OURS}.shared.up", f"{_NEMOTRON_MIXER}.shared_experts.up_proj"),
    Link(f"{moe.OURS}.shared.down", f"{_NEMOTRON_MIXER}.shared_experts.down_proj"),
    Link("final_norm", "backbone.norm_f"),
    common.HEAD,
)


def _nemotron_values(theirs: PreTrainedConfig) -> Found:
    """transformers raises time steps to `time_step_min` and limits them nowhere else."""
    inner, least = theirs.mamba_num_heads * theirs.mamba_head_dim, float(theirs.time_step_min)
    return {
        "mamba2.inner_size": None if inner == theirs.expand * theirs.hidden_size else inner,
        "mamba2.least_step": least if least > NO_STEP else 0.0,
    }, []


def _nemotron_settings(model: ModelSection, kinds: list[str]) -> dict[str, Any]:
    return {
        "layers_block_type": kinds,
        "mamba_num_heads": heads(model),
        "time_step_min": max(model.mamba2.least_step, NO_STEP),
    }


_NEMOTRON_FIELDS = (
    *(*common.STREAM, Field("residual.fp32", "residual_in_fp32"), common.MLP_BIAS, common.HEAD_DIM),
    *common.fields("attention", heads="num_attention_heads", kv_heads="num_key_value_heads"),
    Field("mlp.hidden_size", "intermediate_size"),
    *common.fields(
        "mamba2", expand="expand", head_dim="mamba_head_dim", state_size="ssm_state_size", groups="n_groups"
    ),
    *common.fields("mamba2", convolution="conv_kernel", convolution_bias="use_conv_bias", bias="use_bias"),
    *common.fields("mamba2", time_step_high="time_step_max", time_step_floor="time_step_floor"),
    *common.fields("moe", hidden_size="moe_intermediate_size", shared_size="moe_shared_expert_intermediate_size"),
    *common.fields("moe", experts="n_routed_experts", top_k="num_experts_per_tok", latent_size="moe_latent_size"),
    *(*V3_FIELDS, Field("moe.router.scale", "routed_scaling_factor")),
    *(
        common.rms_norm("layer_norm_epsilon"),
        common.activation("mlp_hidden_act"),
        common.activation("mlp_hidden_act", "moe"),
    ),
)

NEMOTRON_H = Architecture(
    "nemotron_h",
    _NEMOTRON_LINKS,
    Layers(
        {"mamba2": "linear_attention", "attention": "full_attention", "mlp": "mlp", "moe": "moe"},
        _nemotron_values,
        _nemotron_settings,
    ),
    fields=_NEMOTRON_FIELDS,
    fixed={
        **common.BARE,
        "embedding.tied": False,
        **{**common.NO_ATTENTION_BIAS, **common.options("attention", position="none", qk_norm="none")},
        "mlp.gated": False,
        **{**common.EXPERTS_FIXED, **V3_ROUTER, **common.options("moe", gated=False, shared_gate=False)},
        "mamba2.most_step": None,
    },
    required={"tie_word_embeddings": False, "mamba_hidden_act": "silu", "sliding_window": None},
    renamed=((r"^model\.", "backbone."),),
    prefix="backbone.",
    predicts_more=True,
    newer=lambda model: "version 4 does not have the class",
)
