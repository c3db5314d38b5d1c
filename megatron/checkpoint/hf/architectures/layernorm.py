"""Architectures with LayerNorm and rotary attention: Cohere's, StarCoder 2, StableLM, Nemotron, Phi and GPT-J."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from megatron.config import Config
from megatron.config.variants import options_of
from megatron.kinds.attention import hf as attention
from megatron.kinds.common.links import Link
from megatron.kinds.mlp import hf as mlp
from megatron.model.rotary import rotated_channels

from ..architecture import Architecture, Field
from ..layer_types import FULL, SLIDING
from ..layers import Layers, runs_of, uniform
from ..parts import Found, Functions, RotaryPart, WindowPart
from .common import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    HEAD_DIM,
    INTERLEAVED_ATTENTION,
    LLAMA_ATTENTION,
    LLAMA_MLP,
    LLAMA_SIZES,
    OURS,
    OUTPUT_BIAS,
    PRE_NORMS,
    QKV_BIAS,
    SIZES,
    THEIRS,
    activation,
)

_BLOCK = "attention/mlp"
_SIZES = tuple(field for field in LLAMA_SIZES if field.ours != "norm.epsilon")
_EPSILON = Field("norm.epsilon", "layer_norm_eps")
_FIXED = {
    "norm.type": "layernorm",
    "norm.bias": True,
    "residual.norm": "pre",
    "attention.position": "rotary",
    "attention.qk_norm": "none",
    "embedding.position": "none",
}
_SEQUENTIAL = {**_FIXED, "residual.form": "sequential"}
_SHARED_NORM = {**_FIXED, "residual.form": "parallel", "residual.shared_norm": True}
_UNGATED = {"mlp.gated": False}

# -- Cohere: both branches read one norm without a bias ----------------------------------------------------------------

_COHERE = (
    *(EMBEDDING, *INTERLEAVED_ATTENTION, *LLAMA_MLP, FINAL_NORM, HEAD),
    Link(f"{OURS}.mixer_norm", f"{THEIRS}.input_layernorm"),
)
_COHERE_FIELDS = (*_SIZES, _EPSILON, QKV_BIAS, OUTPUT_BIAS, Field("head.multiplier", "logit_scale"))
_COHERE_FIXED = {**_SHARED_NORM, "norm.bias": False, "mlp.gated": True, "mlp.bias": False}

COHERE = Architecture(
    "cohere",
    "CohereForCausalLM",
    _COHERE,
    uniform(_BLOCK),
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
        mixers = [options_of(config.model, block.mixer) for block in config.model.blocks if block.mixer is not None]
        windows = sorted({each.window for each in mixers if each.window is not None})
        return {
            "layer_types": [FULL if each.window is None else SLIDING for each in mixers],
            "sliding_window": windows[0] if windows else None,
        }


COHERE2 = Architecture(
    "cohere2",
    "Cohere2ForCausalLM",
    _COHERE,
    _NearTurned({_BLOCK: ""}),
    fields=_COHERE_FIELDS,
    fixed=_COHERE_FIXED,
    parts=(RotaryPart(),),
)

# -- norms of each branch's own ----------------------------------------------------------------------------------------

STARCODER2 = Architecture(
    "starcoder2",
    "Starcoder2ForCausalLM",
    (
        *(EMBEDDING, *LLAMA_ATTENTION, FINAL_NORM, HEAD, *PRE_NORMS),
        *mlp.plain(f"{THEIRS}.mlp.c_fc", f"{THEIRS}.mlp.c_proj"),
    ),
    uniform(_BLOCK),
    fields=(
        *_SIZES,
        Field("norm.epsilon", "norm_epsilon"),
        *(Field(key, "use_bias") for key in ("attention.qkv_bias", "attention.output_bias", "mlp.bias")),
    ),
    fixed={**_SEQUENTIAL, **_UNGATED},
    parts=(RotaryPart(), WindowPart()),
)

NEMOTRON = Architecture(
    "nemotron",
    "NemotronForCausalLM",
    (
        *(EMBEDDING, *LLAMA_ATTENTION, FINAL_NORM, HEAD, *PRE_NORMS),
        *mlp.plain(f"{THEIRS}.mlp.up_proj", f"{THEIRS}.mlp.down_proj"),
    ),
    uniform(_BLOCK),
    fields=(*_SIZES, Field("norm.epsilon", "norm_eps"), HEAD_DIM, QKV_BIAS, OUTPUT_BIAS, Field("mlp.bias", "mlp_bias")),
    fixed={**_SEQUENTIAL, **_UNGATED, "norm.unit_offset": True},
    parts=(RotaryPart(partial=True),),
)


def _shared_norm(theirs: PreTrainedConfig) -> Found:
    return {"residual.shared_norm": theirs.use_parallel_residual}, []


STABLELM = Architecture(
    "stablelm",
    "StableLmForCausalLM",
    (EMBEDDING, *LLAMA_ATTENTION, *LLAMA_MLP, FINAL_NORM, HEAD, *PRE_NORMS),
    uniform(_BLOCK),
    fields=(
        *_SIZES,
        _EPSILON,
        Field("attention.qkv_bias", "use_qkv_bias"),
        Field("residual.form", "use_parallel_residual", {"parallel": True, "sequential": False}),
    ),
    fixed={**_FIXED, "attention.output_bias": False, "mlp.gated": True, "mlp.bias": False},
    required={"qk_layernorm": False},
    parts=(RotaryPart(partial=True), Functions(_shared_norm)),
)

# -- both branches read one norm, biases in the MLP and the head -------------------------------------------------------

_BIASED_HEAD = {**_SHARED_NORM, **_UNGATED, "mlp.bias": True, "head.bias": True}

PHI = Architecture(
    "phi",
    "PhiForCausalLM",
    (
        *(EMBEDDING, *LLAMA_ATTENTION[:2], HEAD),
        Link(f"{OURS}.attention.output", f"{THEIRS}.self_attn.dense"),
        *mlp.plain(f"{THEIRS}.mlp.fc1", f"{THEIRS}.mlp.fc2"),
        Link(f"{OURS}.mixer_norm", f"{THEIRS}.input_layernorm"),
        Link("final_norm", "model.final_layernorm"),
    ),
    uniform(_BLOCK),
    fields=(*_SIZES, _EPSILON),
    fixed={**_BIASED_HEAD, "attention.qkv_bias": True, "attention.output_bias": True},
    required={"qk_layernorm": False},
    parts=(RotaryPart(partial=True),),
)


def _read_rotary(theirs: PreTrainedConfig) -> Found:
    """The base is written into their class; `rotary_dim` counts the rotated channels of a head."""
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
    "GPTJForCausalLM",
    (
        *(Link("embedding.tokens", "transformer.wte"), _QUERY, _KEY_VALUE, HEAD),
        Link(f"{OURS}.attention.output", f"{_GPTJ}.attn.out_proj"),
        *mlp.plain(f"{_GPTJ}.mlp.fc_in", f"{_GPTJ}.mlp.fc_out"),
        Link(f"{OURS}.mixer_norm", f"{_GPTJ}.ln_1"),
        Link("final_norm", "transformer.ln_f"),
    ),
    uniform(_BLOCK),
    fields=(
        *SIZES,
        Field("mlp.hidden_size", "n_inner"),
        activation("activation_function"),
        Field("norm.epsilon", "layer_norm_epsilon"),
    ),
    fixed={**_BIASED_HEAD, "attention.qkv_bias": False, "attention.output_bias": False},
    parts=(Functions(_read_rotary, _write_rotary),),
    prefix="transformer.",
    buffers=(r".*\.attn\.(bias|masked_bias|embed_positions)",),
)
