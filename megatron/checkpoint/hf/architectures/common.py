"""Tables that architectures share: tensors and options by both names, and options with one value."""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig

from megatron.kinds.attention import hf as attention
from megatron.kinds.common.links import Link
from megatron.kinds.mlp import hf as mlp

from ..architecture import Architecture, ConfigPart, Field, Layers, Listed, listed
from ..layer_types import RotaryPart

OURS, THEIRS = "layers.{n}", "model.layers.{n}"
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "silu": "silu",
    "relu": "relu",
    "relu2": "relu2",
    "identity": "linear",
}
ALSO = {
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_python": "gelu",
    "swish": "silu",
}


def options(section: str, **values: Any) -> dict[str, Any]:
    """Values of a section by their dotted keys."""
    return {f"{section}.{name}": value for name, value in values.items()}


def fields(section: str, **theirs: str) -> tuple[Field, ...]:
    """Options of a section (ours=theirs) that both sides have."""
    return tuple(Field(f"{section}.{ours}" if section else ours, name) for ours, name in theirs.items())


def activation(theirs: str, section: str = "mlp") -> Field:
    return Field(f"{section}.activation", theirs, ACTIVATIONS, ALSO)


def rms_norm(theirs: str = "rms_norm_eps") -> Field:
    return Field("norm.epsilon", theirs)


# -- options -----------------------------------------------------------------------------------------------------------

STREAM = fields("", hidden_size="hidden_size", vocab_size="vocab_size")
TIED = Field("embedding.tied", "tie_word_embeddings")
SIZES = (*STREAM, TIED, Field("attention.heads", "num_attention_heads"))
ATTENTION_BIASES = fields("attention", qkv_bias="attention_bias", output_bias="attention_bias")
QKV_BIAS, OUTPUT_BIAS = ATTENTION_BIASES
MLP_BIAS = Field("mlp.bias", "mlp_bias")
LLAMA_SIZES = (
    *SIZES,
    Field("attention.kv_heads", "num_key_value_heads"),
    Field("mlp.hidden_size", "intermediate_size"),
    activation("hidden_act"),
    rms_norm(),
)
HEAD_DIM = Field("attention.head_dim", "head_dim")
BARE = {"norm.type": "rmsnorm", "residual.norm": "pre", "embedding.position": "none"}
ATTENTION_FIXED = {**BARE, "residual.form": "sequential", **options("attention", position="rotary", qk_norm="none")}
LLAMA_FIXED = {**ATTENTION_FIXED, "mlp.gated": True}
NO_ATTENTION_BIAS = options("attention", qkv_bias=False, output_bias=False)
NO_BIAS = {**NO_ATTENTION_BIAS, "mlp.bias": False}


def experts(width: str, count: str) -> tuple[Field, ...]:
    """Sizes of attention and of gated experts."""
    return (
        *SIZES,
        Field("attention.kv_heads", "num_key_value_heads"),
        rms_norm(),
        activation("hidden_act", "moe"),
        *fields("moe", hidden_size=width, experts=count, top_k="num_experts_per_tok"),
    )


EXPERTS_FIXED = {
    **options("moe", gated=True, capacity_factor=None),
    **options("moe.router", network="linear", bias=False, score="softmax", select="top_k", correction="none"),
}
MOE_FIXED = {**ATTENTION_FIXED, **EXPERTS_FIXED, "moe.shared_size": 0, **options("moe.router", scale=1.0, groups=1)}

# -- tensors -----------------------------------------------------------------------------------------------------------

EMBEDDING = Link("embedding.tokens", "model.embed_tokens")
FINAL_NORM = Link("final_norm", "model.norm")
HEAD = Link("head", "lm_head")
LLAMA_ATTENTION = attention.separate(f"{THEIRS}.self_attn")
INTERLEAVED_ATTENTION = attention.separate(
    f"{THEIRS}.self_attn", query=attention.pairs, key_value=attention.pairs_and_values
)
LLAMA_MLP = mlp.gated(f"{THEIRS}.mlp")
QK_NORMS = attention.norms(f"{THEIRS}.self_attn")
LLAMA_COMMON = (EMBEDDING, *LLAMA_ATTENTION, *LLAMA_MLP, FINAL_NORM, HEAD)


def norms(mixer: str, ffn: str) -> tuple[Link, ...]:
    """The two norms of a layer, by their names there."""
    return Link(f"{OURS}.mixer_norm", f"{THEIRS}.{mixer}"), Link(f"{OURS}.ffn_norm", f"{THEIRS}.{ffn}")


def dense(
    name: str,
    links: tuple[Link, ...],
    layers: Layers = Architecture.layers,
    *,
    more: tuple[Field, ...] = (),
    fixed: dict[str, Any] | None = None,
    parts: tuple[ConfigPart, ...] = (RotaryPart(),),
    **others: Any,
) -> Architecture:
    """A variant of Llama.

    Args:
        layers: by default an attention and an MLP in every layer.
        more: options in addition to `LLAMA_SIZES`.
        fixed: values in addition to `LLAMA_FIXED`, or in their place.
    """
    return Architecture(name, links, layers, (*LLAMA_SIZES, *more), LLAMA_FIXED | (fixed or {}), parts=parts, **others)


def mixed(
    mixers: dict[str, str], ffns: Callable[[PreTrainedConfig], list[str]] = lambda t: t.mlp_layer_types, **others: Any
) -> Listed:
    """Layers with any of these mixers (ours -> theirs) and an MLP ("dense") or experts ("sparse").

    Args:
        ffns: gives their name of each layer's feed-forward network.
    """
    kinds = {"moe": "sparse", "mlp": "dense"}
    blocks = {f"{ours}/{ffn}": f"{theirs} {kinds[ffn]}" for ours, theirs in mixers.items() for ffn in kinds}

    def names(theirs: PreTrainedConfig) -> list[str]:
        return list(map(" ".join, zip(theirs.layer_types, ffns(theirs), strict=True)))

    needed = tuple(f"{next(iter(mixers))}/{ffn}" for ffn in kinds)
    return Listed(blocks, needed=needed, listed=names, **{"settings": listed, **others})


PRE_NORMS = norms("input_layernorm", "post_attention_layernorm")
POST_NORMS = norms("post_attention_layernorm", "post_feedforward_layernorm")
LLAMA_LINKS = LLAMA_COMMON + PRE_NORMS
