"""Architectures of Llama's kind: rotary attention and a gated MLP in every layer, with few options of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from . import tables
from .architecture import Architecture, Field
from .fields import HEAD_DIM, LLAMA_FIXED, LLAMA_SIZES, NO_BIAS, OUTPUT_BIAS, QKV_BIAS, activation
from .layer_types import ByLayer
from .links import Link, Pairs, QueryKeyValue

_OURS, _THEIRS = "layers.{n}", "model.layers.{n}"


@dataclass(frozen=True)
class Power(Field):
    """Our number is theirs to a power (-1: the inverse); whole numbers of theirs stay whole."""

    power: float = -1.0

    def to_hf(self, value: Any) -> Any:
        found = value ** (1.0 / self.power)
        return round(found) if abs(found - round(found)) < 1e-9 * abs(found) else found

    def from_hf(self, value: Any) -> Any:
        return float(value) ** self.power


QWEN2 = Architecture(
    "qwen2",
    "Qwen2ForCausalLM",
    tables.LLAMA,
    fields=LLAMA_SIZES,
    fixed={**LLAMA_FIXED, "attention.qkv_bias": True, "attention.output_bias": False, "mlp.bias": False},
    window="layer",
)

SMOLLM3 = Architecture(
    "smollm3",
    "SmolLM3ForCausalLM",
    tables.LLAMA,
    fields=(*LLAMA_SIZES, QKV_BIAS, OUTPUT_BIAS, Field("mlp.bias", "mlp_bias")),
    fixed=LLAMA_FIXED,
    hybrid=ByLayer({"attention/mlp": ""}, unturned=True),
)

OLMO3 = Architecture(
    "olmo3",
    "Olmo3ForCausalLM",
    tables.OLMO2,
    fields=(*LLAMA_SIZES, QKV_BIAS, OUTPUT_BIAS),
    fixed={**LLAMA_FIXED, "residual.norm": "post", "attention.qk_norm": "full", "mlp.bias": False},
    rotary="none",
    hybrid=ByLayer({"attention/mlp": ""}, ropes=True),
    buffers=(r".*rotary_emb\..*",),
)

GRANITE = Architecture(
    "granite",
    "GraniteForCausalLM",
    tables.LLAMA,
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
)


def _without(*parts: str) -> tuple[Link, ...]:
    """Llama's links but those of these of our modules."""
    return tuple(link for link in tables.LLAMA if not any(part in str(link.ours) for part in parts))


_PHI3_LINKS = (
    *_without(".query", ".key_value", ".gate_up"),
    Link(
        (f"{_OURS}.attention.query", f"{_OURS}.attention.key_value"), f"{_THEIRS}.self_attn.qkv_proj", QueryKeyValue()
    ),
    Link(f"{_OURS}.mlp.gate_up", f"{_THEIRS}.mlp.gate_up_proj"),
)
PHI3 = Architecture(
    "phi3",
    "Phi3ForCausalLM",
    _PHI3_LINKS,
    fields=LLAMA_SIZES,
    fixed={**LLAMA_FIXED, **NO_BIAS},
    rotary="partial",
    window="all",
)

_GLM4_LINKS = (
    *_without(".query", ".key_value", ".gate_up"),
    Link(f"{_OURS}.attention.query", f"{_THEIRS}.self_attn.q_proj", Pairs()),
    Link(
        f"{_OURS}.attention.key_value",
        (f"{_THEIRS}.self_attn.k_proj", f"{_THEIRS}.self_attn.v_proj"),
        Pairs(values=True),
    ),
    Link(f"{_OURS}.mixer_output_norm", f"{_THEIRS}.post_self_attn_layernorm"),
    Link(f"{_OURS}.ffn_output_norm", f"{_THEIRS}.post_mlp_layernorm"),
    Link(f"{_OURS}.mlp.gate_up", f"{_THEIRS}.mlp.gate_up_proj"),
)
GLM4 = Architecture(
    "glm4",
    "Glm4ForCausalLM",
    _GLM4_LINKS,
    fields=(*LLAMA_SIZES, HEAD_DIM, QKV_BIAS),
    fixed={**LLAMA_FIXED, "residual.norm": "both", "attention.output_bias": False, "mlp.bias": False},
    rotary="partial",
)


_GEMMA_LINKS = (
    *_without("_norm"),
    Link("final_norm", "model.norm"),
    Link(f"{_OURS}.mixer_norm", f"{_THEIRS}.input_layernorm"),
    Link(f"{_OURS}.mixer_output_norm", f"{_THEIRS}.post_attention_layernorm"),
    Link(f"{_OURS}.ffn_norm", f"{_THEIRS}.pre_feedforward_layernorm"),
    Link(f"{_OURS}.ffn_output_norm", f"{_THEIRS}.post_feedforward_layernorm"),
)
_GEMMA_FIELDS = (
    *(field for field in LLAMA_SIZES if field.theirs != "hidden_act"),
    activation("hidden_activation"),
    HEAD_DIM,
    QKV_BIAS,
    OUTPUT_BIAS,
    Power("attention.scale", "query_pre_attn_scalar", power=-0.5),
    Field("head.softcap", "final_logit_softcapping"),
)
_GEMMA_FIXED = {**LLAMA_FIXED, "residual.norm": "both", "norm.unit_offset": True, "mlp.bias": False}


def _gemma(theirs: PreTrainedConfig) -> dict[str, Any]:
    return {"embedding.multiplier": theirs.hidden_size**0.5}


GEMMA2 = Architecture(
    "gemma2",
    "Gemma2ForCausalLM",
    _GEMMA_LINKS,
    fields=(*_GEMMA_FIELDS, Field("attention.softcap", "attn_logit_softcapping")),
    fixed=_GEMMA_FIXED,
    required={"use_bidirectional_attention": None},
    hybrid=ByLayer({"attention/mlp": ""}, more=_gemma),
)

GEMMA3 = Architecture(
    "gemma3_text",
    "Gemma3ForCausalLM",
    (*_GEMMA_LINKS, *tables.QK_NORMS),
    fields=_GEMMA_FIELDS,
    fixed={**_GEMMA_FIXED, "attention.qk_norm": "head"},
    # its attention has the option and does not use it
    required={"use_bidirectional_attention": False, "attn_logit_softcapping": None},
    rotary="none",
    hybrid=ByLayer({"attention/mlp": ""}, ropes=True, more=_gemma),
    buffers=(r".*rotary_emb\..*",),
)

ALL = (QWEN2, SMOLLM3, OLMO3, GRANITE, PHI3, GLM4, GEMMA2, GEMMA3)
