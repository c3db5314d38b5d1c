"""What architectures share: tensors and options by their names on both sides, and what all compute the same way."""

from __future__ import annotations

from megatron.kinds.attention import hf as attention
from megatron.kinds.common.links import Link
from megatron.kinds.mlp import hf as mlp

from ..architecture import Field

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


def activation(theirs: str, section: str = "mlp") -> Field:
    return Field(f"{section}.activation", theirs, ACTIVATIONS, ALSO)


def rms_norm(theirs: str = "rms_norm_eps") -> Field:
    return Field("norm.epsilon", theirs)


# -- options -----------------------------------------------------------------------------------------------------------

SIZES = (
    Field("hidden_size", "hidden_size"),
    Field("vocab_size", "vocab_size"),
    Field("attention.heads", "num_attention_heads"),
    Field("embedding.tied", "tie_word_embeddings"),
)
QKV_BIAS, OUTPUT_BIAS = (
    Field("attention.qkv_bias", "attention_bias"),
    Field("attention.output_bias", "attention_bias"),
)
LLAMA_SIZES = (
    *SIZES,
    Field("attention.kv_heads", "num_key_value_heads"),
    Field("mlp.hidden_size", "intermediate_size"),
    activation("hidden_act"),
    rms_norm(),
)
HEAD_DIM = Field("attention.head_dim", "head_dim")
LLAMA_FIXED = {
    "norm.type": "rmsnorm",
    "residual.form": "sequential",
    "residual.norm": "pre",
    "attention.position": "rotary",
    "attention.qk_norm": "none",
    "mlp.gated": True,
    "embedding.position": "none",
}
NO_BIAS = {"attention.qkv_bias": False, "attention.output_bias": False, "mlp.bias": False}
BARE = {"norm.type": "rmsnorm", "residual.norm": "pre", "embedding.position": "none"}


def experts(width: str, count: str) -> tuple[Field, ...]:
    """Sizes of attention and of gated experts."""
    return (
        *SIZES,
        Field("attention.kv_heads", "num_key_value_heads"),
        rms_norm(),
        activation("hidden_act", "moe"),
        Field("moe.hidden_size", width),
        Field("moe.experts", count),
        Field("moe.top_k", "num_experts_per_tok"),
    )


MOE_FIXED = {
    **{key: value for key, value in LLAMA_FIXED.items() if not key.startswith("mlp.")},
    "moe.gated": True,
    "moe.shared_size": 0,
    "moe.capacity_factor": None,
    "moe.router.network": "linear",
    "moe.router.bias": False,
    "moe.router.score": "softmax",
    "moe.router.select": "top_k",
    "moe.router.scale": 1.0,
    "moe.router.groups": 1,
    "moe.router.correction": "none",
}

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


PRE_NORMS = norms("input_layernorm", "post_attention_layernorm")
POST_NORMS = norms("post_attention_layernorm", "post_feedforward_layernorm")
LLAMA_LINKS = LLAMA_COMMON + PRE_NORMS
