"""Architectures with LayerNorm and rotary attention: GPT's, Cohere's, StarCoder 2, StableLM, Nemotron, Phi."""

from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedConfig

from megatron.config import Config
from megatron.kinds.attention import hf as attention
from megatron.kinds.common.links import Link, transposed
from megatron.kinds.mlp import hf as mlp
from megatron.model.rotary import rotated_channels

from ..architecture import Architecture, Field, Found, Functions, Layers, runs_of
from ..layer_types import FULL, SLIDING, RotaryPart, WindowPart, mixers_of, window_settings
from . import common

LAYERNORM_FIXED = {
    **common.options("norm", type="layernorm", bias=True),
    "residual.norm": "pre",
    **common.options("attention", position="rotary", qk_norm="none"),
    "embedding.position": "none",
}
PARALLEL = Field("residual.form", "use_parallel_residual", {"parallel": True, "sequential": False})
GPT2_FIELDS = (
    *(*common.SIZES, common.activation("activation_function")),
    Field("mlp.hidden_size", "n_inner"),
    Field("norm.epsilon", "layer_norm_epsilon"),
)
_OURS, _NEOX, _GPT2 = "layers.{n}", "gpt_neox.layers.{n}", "transformer.h.{n}"


def _older_neox(settings: dict[str, Any]) -> dict[str, Any]:
    rope = settings.get("rope_parameters") or {}
    if rope.get("rope_theta") is None:
        return {}
    return {"rotary_emb_base": rope["rope_theta"], "rotary_pct": rope.get("partial_rotary_factor", 1.0)}


GPT_NEOX = Architecture(
    "gpt_neox",
    (
        Link("embedding.tokens", "gpt_neox.embed_in"),
        Link(f"{_OURS}.mixer_norm", f"{_NEOX}.input_layernorm"),
        *attention.joined(
            f"{_NEOX}.attention.query_key_value", f"{_NEOX}.attention.dense", attention.query_key_value_by_head
        ),
        Link(f"{_OURS}.ffn_norm", f"{_NEOX}.post_attention_layernorm"),
        *mlp.plain(f"{_NEOX}.mlp.dense_h_to_4h", f"{_NEOX}.mlp.dense_4h_to_h"),
        Link("final_norm", "gpt_neox.final_layer_norm"),
        Link("head", "embed_out"),
    ),
    fields=(
        *(*common.SIZES, *common.ATTENTION_BIASES, common.activation("hidden_act")),
        Field("mlp.hidden_size", "intermediate_size"),
        Field("norm.epsilon", "layer_norm_eps"),
        PARALLEL,
    ),
    fixed={**LAYERNORM_FIXED, "residual.shared_norm": False, **common.options("mlp", gated=False, bias=True)},
    parts=(RotaryPart(partial=True),),
    aliases={"lm_head.weight": "embed_out.weight"},
    prefix="gpt_neox.",
    buffers=(r".*rotary_emb\.inv_freq", r".*\.attention\.(bias|masked_bias)"),
    older=_older_neox,
)


def _gpt2_positions(config: Config) -> dict[str, Any]:
    """Reading back shows a model without learned positions, which this architecture cannot express."""
    return {"n_positions": config.model.embedding.max_positions or config.training.sequence_length}


GPT2 = Architecture(
    "gpt2",
    (
        Link("embedding.tokens", "transformer.wte"),
        Link("embedding.positions", "transformer.wpe"),
        Link(f"{_OURS}.mixer_norm", f"{_GPT2}.ln_1"),
        *attention.joined(
            f"{_GPT2}.attn.c_attn",
            f"{_GPT2}.attn.c_proj",
            lambda model: transposed(attention.query_key_value(model)),
            transposed(),
        ),
        Link(f"{_OURS}.ffn_norm", f"{_GPT2}.ln_2"),
        *mlp.plain(f"{_GPT2}.mlp.c_fc", f"{_GPT2}.mlp.c_proj", transposed()),
        Link("final_norm", "transformer.ln_f"),
        common.HEAD,
    ),
    fields=(*GPT2_FIELDS, Field("embedding.max_positions", "n_positions")),
    fixed={
        **LAYERNORM_FIXED,
        "residual.form": "sequential",
        **common.options("attention", position="none", qkv_bias=True, output_bias=True),
        **common.options("mlp", gated=False, bias=True),
        "embedding.position": "learned",
    },
    required={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    parts=(Functions(write=_gpt2_positions),),
    prefix="transformer.",
    buffers=(r".*\.attn\.(bias|masked_bias)",),
)


_BLOCK = "attention/mlp"
_SIZES = tuple(field for field in common.LLAMA_SIZES if field.ours != "norm.epsilon")
_EPSILON = Field("norm.epsilon", "layer_norm_eps")
_SEQUENTIAL = {**LAYERNORM_FIXED, "residual.form": "sequential", "mlp.gated": False}
_SHARED_NORM = {**LAYERNORM_FIXED, **common.options("residual", form="parallel", shared_norm=True)}

# -- Cohere: both branches read one norm without a bias ----------------------------------------------------------------

_COHERE = (
    *(common.EMBEDDING, *common.INTERLEAVED_ATTENTION, *common.LLAMA_MLP, common.FINAL_NORM, common.HEAD),
    Link(f"{common.OURS}.mixer_norm", f"{common.THEIRS}.input_layernorm"),
)
_COHERE_FIELDS = (*_SIZES, _EPSILON, *common.ATTENTION_BIASES, Field("head.multiplier", "logit_scale"))
_COHERE_FIXED = {**_SHARED_NORM, "norm.bias": False, **common.options("mlp", gated=True, bias=False)}

COHERE = Architecture(
    "cohere",
    _COHERE,
    fields=_COHERE_FIELDS,
    fixed=_COHERE_FIXED,
    required={"use_qk_norm": False},  # a norm with weights of each head's own is not computed here
    parts=(RotaryPart(),),
)


@dataclass(frozen=True)
class _NearTurned(Layers):
    """Rotary positions in the layers with a window (ours without a variant), and no positions in the others."""

    def pattern(self, theirs: PreTrainedConfig) -> str:
        names = {SLIDING: _BLOCK, FULL: "attention@far/mlp"}
        return runs_of([names[kind] for kind in theirs.layer_types])

    def read(self, theirs: PreTrainedConfig) -> Found:
        values: dict[str, Any] = {"layers": self.pattern(theirs), "attention.window": theirs.sliding_window}
        far = {"variants": {"far": {"position": "none", "window": None}}}
        return values | (far if FULL in theirs.layer_types else {}), []

    def write(self, config: Config) -> dict[str, Any]:
        return window_settings(mixers_of(config.model))


COHERE2 = replace(COHERE, name="cohere2", layers=_NearTurned({_BLOCK: ""}), required={})

# -- norms of each branch's own ----------------------------------------------------------------------------------------

STARCODER2 = Architecture(
    "starcoder2",
    (
        *(common.EMBEDDING, *common.LLAMA_ATTENTION, common.FINAL_NORM, common.HEAD, *common.PRE_NORMS),
        *mlp.plain(f"{common.THEIRS}.mlp.c_fc", f"{common.THEIRS}.mlp.c_proj"),
    ),
    fields=(
        *_SIZES,
        Field("norm.epsilon", "norm_epsilon"),
        *(Field(key, "use_bias") for key in ("attention.qkv_bias", "attention.output_bias", "mlp.bias")),
    ),
    fixed=_SEQUENTIAL,
    parts=(RotaryPart(), WindowPart()),
)

NEMOTRON = Architecture(
    "nemotron",
    (
        *(common.EMBEDDING, *common.LLAMA_ATTENTION, common.FINAL_NORM, common.HEAD, *common.PRE_NORMS),
        *mlp.plain(f"{common.THEIRS}.mlp.up_proj", f"{common.THEIRS}.mlp.down_proj"),
    ),
    fields=(*_SIZES, Field("norm.epsilon", "norm_eps"), common.HEAD_DIM, *common.ATTENTION_BIASES, common.MLP_BIAS),
    fixed={**_SEQUENTIAL, "norm.unit_offset": True},
    parts=(RotaryPart(partial=True),),
)


_SHARED = Functions(lambda theirs: ({"residual.shared_norm": theirs.use_parallel_residual}, []))
STABLELM = Architecture(
    "stablelm",
    (common.EMBEDDING, *common.LLAMA_ATTENTION, *common.LLAMA_MLP, common.FINAL_NORM, common.HEAD, *common.PRE_NORMS),
    fields=(*_SIZES, _EPSILON, Field("attention.qkv_bias", "use_qkv_bias"), PARALLEL),
    fixed={**LAYERNORM_FIXED, "attention.output_bias": False, **common.options("mlp", gated=True, bias=False)},
    required={"qk_layernorm": False},
    parts=(RotaryPart(partial=True), _SHARED),
)

# -- both branches read one norm, biases in the MLP and the head -------------------------------------------------------

_BIASED_HEAD = {**_SHARED_NORM, **common.options("mlp", gated=False, bias=True), "head.bias": True}

PHI = Architecture(
    "phi",
    (
        *(common.EMBEDDING, *common.LLAMA_ATTENTION[:2], common.HEAD),
        Link(f"{common.OURS}.attention.output", f"{common.THEIRS}.self_attn.dense"),
        *mlp.plain(f"{common.THEIRS}.mlp.fc1", f"{common.THEIRS}.mlp.fc2"),
        Link(f"{common.OURS}.mixer_norm", f"{common.THEIRS}.input_layernorm"),
        Link("final_norm", "model.final_layernorm"),
    ),
    fields=(*_SIZES, _EPSILON),
    fixed={**_BIASED_HEAD, **common.options("attention", qkv_bias=True, output_bias=True)},
    required={"qk_layernorm": False},
    parts=(RotaryPart(partial=True),),
)


def _read_rotary(theirs: PreTrainedConfig) -> Found:
    """The base is a constant of their class. `rotary_dim` counts the rotated channels of a head."""
    head_dim = theirs.n_embd // theirs.n_head
    return {"attention.rotary": {"base": 10_000.0, "fraction": (theirs.rotary_dim or head_dim) / head_dim}}, []


def _write_rotary(config: Config) -> dict[str, Any]:
    own = config.model.attention
    rotated = rotated_channels(own.rotary, own.head_dim)
    return {"rotary_dim": rotated, "n_positions": config.training.sequence_length}


_GPTJ = "transformer.h.{n}"
_QUERY, _KEY_VALUE, _ = attention.separate(f"{_GPTJ}.attn", query=attention.pairs, key_value=attention.pairs_and_values)
GPTJ = Architecture(
    "gptj",
    (
        *(Link("embedding.tokens", "transformer.wte"), _QUERY, _KEY_VALUE, common.HEAD),
        Link(f"{common.OURS}.attention.output", f"{_GPTJ}.attn.out_proj"),
        *mlp.plain(f"{_GPTJ}.mlp.fc_in", f"{_GPTJ}.mlp.fc_out"),
        Link(f"{common.OURS}.mixer_norm", f"{_GPTJ}.ln_1"),
        Link("final_norm", "transformer.ln_f"),
    ),
    fields=GPT2_FIELDS,
    fixed={**_BIASED_HEAD, **common.NO_ATTENTION_BIAS},
    parts=(Functions(_read_rotary, _write_rotary),),
    prefix="transformer.",
    buffers=(r".*\.attn\.(bias|masked_bias|embed_positions)",),
)
