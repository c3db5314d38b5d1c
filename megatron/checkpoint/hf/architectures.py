"""The architectures that models can be exchanged with, each by its tables."""

from __future__ import annotations

from . import hybrids, jamba, llamas, singular, tables, zamba, zaya
from .architecture import Architecture, Field
from .fields import (
    ACTIVATIONS,
    ALSO,
    HEAD_DIM,
    LLAMA_FIXED,
    LLAMA_SIZES,
    MOE_FIXED,
    NO_BIAS,
    NORMALIZE,
    OUTPUT_BIAS,
    QKV_BIAS,
    SIZES,
    activation,
    experts,
    rms,
)

GPT_NEOX = Architecture(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    tables.GPT_NEOX,
    fields=(
        *SIZES,
        Field("mlp.hidden_size", "intermediate_size"),
        activation("hidden_act"),
        Field("norm.epsilon", "layer_norm_eps"),
        Field("residual.form", "use_parallel_residual", {"parallel": True, "sequential": False}),
        QKV_BIAS,
        OUTPUT_BIAS,
    ),
    fixed={
        "norm.type": "layernorm",
        "norm.bias": True,
        "residual.norm": "pre",
        "residual.shared_norm": False,
        "attention.position": "rotary",
        "attention.qk_norm": "none",
        "mlp.gated": False,
        "mlp.bias": True,
        "embedding.position": "none",
    },
    rotary="partial",
    aliases={"lm_head.weight": "embed_out.weight"},
    prefix="gpt_neox.",
    buffers=(r".*rotary_emb\.inv_freq", r".*\.attention\.(bias|masked_bias)"),
)

LLAMA = Architecture(
    "llama",
    "LlamaForCausalLM",
    tables.LLAMA,
    fields=(*LLAMA_SIZES, HEAD_DIM, QKV_BIAS, OUTPUT_BIAS, Field("mlp.bias", "mlp_bias")),
    fixed=LLAMA_FIXED,
)

MISTRAL = Architecture(
    "mistral",
    "MistralForCausalLM",
    tables.MISTRAL,
    fields=(*LLAMA_SIZES, HEAD_DIM),
    fixed={**LLAMA_FIXED, **NO_BIAS},
    window="all",
)

QWEN3 = Architecture(
    "qwen3",
    "Qwen3ForCausalLM",
    tables.QWEN3,
    fields=(*LLAMA_SIZES, HEAD_DIM, QKV_BIAS, OUTPUT_BIAS),
    fixed={**LLAMA_FIXED, "attention.qk_norm": "head", "mlp.bias": False},
    window="layer",
)

OLMO2 = Architecture(
    "olmo2",
    "Olmo2ForCausalLM",
    tables.OLMO2,
    fields=(*LLAMA_SIZES, QKV_BIAS, OUTPUT_BIAS),
    fixed={**LLAMA_FIXED, "residual.norm": "post", "attention.qk_norm": "full", "mlp.bias": False},
)

_DELTA = {
    "heads": "linear_num_value_heads",
    "key_heads": "linear_num_key_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "convolution": "linear_conv_kernel_dim",
    "negative_eigenvalues": "linear_allow_neg_eigval",
    "decay_low": "linear_a_log_min",
    "decay_high": "linear_a_log_max",
    "time_step_low": "linear_dt_min",
    "time_step_high": "linear_dt_max",
    "time_step_floor": "linear_dt_init_floor",
}
OLMO_HYBRID = Architecture(
    "olmo_hybrid",
    "OlmoHybridForCausalLM",
    tables.OLMO_HYBRID,
    fields=(
        *LLAMA_SIZES,
        QKV_BIAS,
        OUTPUT_BIAS,
        *(Field(f"gated_delta.{ours}", theirs) for ours, theirs in _DELTA.items()),
    ),
    fixed={
        **{key: value for key, value in LLAMA_FIXED.items() if key != "attention.position"},
        "residual.norm": "hybrid",
        "attention.qk_norm": "full",
        "mlp.bias": False,
        "gated_delta.convolution_bias": False,
        "gated_delta.norm_epsilon": 1e-5,  # written into their class
    },
    required={"hidden_act": "silu"},
    rotary="none",
    hybrid=hybrids.OLMO_HYBRID,
    renamed=(
        (r"\binput_layernorm\b", "attention_layer_norm"),
        (r"\bpost_attention_layernorm\b", "feedforward_layer_norm"),
    ),
)

GPT2 = Architecture(
    "gpt2",
    "GPT2LMHeadModel",
    tables.GPT2,
    fields=(
        *SIZES,
        Field("mlp.hidden_size", "n_inner"),
        activation("activation_function"),
        Field("norm.epsilon", "layer_norm_epsilon"),
        Field("embedding.max_positions", "n_positions"),
    ),
    fixed={
        "norm.type": "layernorm",
        "norm.bias": True,
        "residual.form": "sequential",
        "residual.norm": "pre",
        "attention.position": "none",
        "attention.qk_norm": "none",
        "attention.qkv_bias": True,
        "attention.output_bias": True,
        "mlp.gated": False,
        "mlp.bias": True,
        "embedding.position": "learned",
    },
    required={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    rotary="none",
    prefix="transformer.",
    buffers=(r".*\.attn\.(bias|masked_bias)",),
)


def _state_space(kind: str) -> tuple[Field, ...]:
    """Options that Mamba and Mamba-2 call alike; those of initial values are told, too."""
    return (
        Field("hidden_size", "hidden_size"),
        Field("vocab_size", "vocab_size"),
        Field("embedding.tied", "tie_word_embeddings"),
        Field("norm.epsilon", "layer_norm_epsilon"),
        Field(f"{kind}.expand", "expand"),
        Field(f"{kind}.state_size", "state_size"),
        Field(f"{kind}.convolution", "conv_kernel"),
        Field(f"{kind}.convolution_bias", "use_conv_bias"),
        Field(f"{kind}.bias", "use_bias"),
        Field(f"{kind}.time_step_low", "time_step_min"),
        Field(f"{kind}.time_step_high", "time_step_max"),
        Field(f"{kind}.time_step_floor", "time_step_floor"),
        Field("residual.fp32", "residual_in_fp32"),
    )


_BARE = {"norm.type": "rmsnorm", "residual.norm": "pre", "embedding.position": "none"}

MAMBA = Architecture(
    "mamba",
    "MambaForCausalLM",
    tables.MAMBA,
    fields=(*_state_space("mamba"), Field("mamba.rank", "time_step_rank")),
    fixed=_BARE,
    required={"hidden_act": "silu"},
    rotary="none",
    block="mamba",
    prefix="backbone.",
    buffers=(),
)

MAMBA2 = Architecture(
    "mamba2",
    "Mamba2ForCausalLM",
    tables.MAMBA2,
    fields=(*_state_space("mamba2"), Field("mamba2.groups", "n_groups"), Field("mamba2.head_dim", "head_dim")),
    fixed=_BARE,
    required={"hidden_act": "silu"},
    rotary="none",
    block="mamba2",
    prefix="backbone.",
    buffers=(),
    reads=singular.read_mamba2,
    writes=singular.write_mamba2,
)


MIXTRAL = Architecture(
    "mixtral",
    "MixtralForCausalLM",
    tables.MIXTRAL,
    fields=(*experts("intermediate_size", "num_local_experts"), HEAD_DIM),
    fixed={**MOE_FIXED, "attention.qkv_bias": False, "attention.output_bias": False, "moe.router.normalize": True},
    required={"router_jitter_noise": 0.0},
    block="attention/moe",
    window="all",
)

_QWEN_MOE = (
    *experts("moe_intermediate_size", "num_experts"),
    NORMALIZE,
    Field("mlp.hidden_size", "intermediate_size"),
    activation("hidden_act"),
)
_QWEN_MOE_FIXED = {**MOE_FIXED, "mlp.gated": True, "mlp.bias": False}
QWEN2_MOE = Architecture(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    tables.QWEN2_MOE,
    fields=(
        *_QWEN_MOE,
        Field("moe.shared_size", "shared_expert_intermediate_size"),
        Field("attention.qkv_bias", "qkv_bias"),
    ),
    fixed={
        **{key: value for key, value in _QWEN_MOE_FIXED.items() if key != "moe.shared_size"},
        "moe.shared_gate": True,
        "attention.output_bias": False,
    },
    required={"use_sliding_window": False},
    block="attention/moe",
    hybrid=hybrids.SPARSE,
)

QWEN3_MOE = Architecture(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    tables.QWEN3_MOE,
    fields=(*_QWEN_MOE, Field("attention.head_dim", "head_dim", optional=True), QKV_BIAS, OUTPUT_BIAS),
    fixed={**_QWEN_MOE_FIXED, "attention.qk_norm": "head"},
    required={"use_sliding_window": False},
    block="attention/moe",
    hybrid=hybrids.SPARSE,
)

OLMOE = Architecture(
    "olmoe",
    "OlmoeForCausalLM",
    tables.OLMOE,
    fields=(*experts("intermediate_size", "num_experts"), NORMALIZE, QKV_BIAS, OUTPUT_BIAS),
    fixed={**MOE_FIXED, "attention.qk_norm": "full"},
    required={"clip_qkv": None},
    block="attention/moe",
)


_SHARED = "shared_attention"
ZAMBA2 = Architecture(
    "zamba2",
    "Zamba2ForCausalLM",
    tables.ZAMBA2,
    fields=(
        Field("hidden_size", "hidden_size"),
        Field("vocab_size", "vocab_size"),
        Field("mamba2.expand", "mamba_expand"),
        Field("mamba2.state_size", "mamba_d_state"),
        Field("mamba2.convolution", "mamba_d_conv"),
        Field("mamba2.groups", "mamba_ngroups"),
        Field("mamba2.time_step_high", "time_step_max"),
        Field("mamba2.time_step_floor", "time_step_floor"),
        Field(f"{_SHARED}.heads", "num_attention_heads"),
        Field(f"{_SHARED}.kv_heads", "num_key_value_heads"),
        Field(f"{_SHARED}.blocks", "num_mem_blocks"),
        Field(f"{_SHARED}.adapter_rank", "adapter_rank"),
        Field(f"{_SHARED}.attention_adapters", "use_shared_attention_adapter"),
        Field(f"{_SHARED}.mlp.hidden_size", "intermediate_size"),
        Field(f"{_SHARED}.mlp.activation", "hidden_act", ACTIVATIONS, ALSO),
    ),
    # transformers ties the shared blocks where it ties the embedding, and only there
    fixed={
        **_BARE,
        "embedding.tied": True,
        "norm.epsilon": 1e-5,
        "mamba2.convolution_bias": True,
        "mamba2.most_step": None,
        f"{_SHARED}.mlp.gated": True,
    },
    required={"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "use_long_context": False, "use_conv_bias": True},
    rotary="none",
    block="mamba2",
    hybrid=zamba.ZAMBA2,
)

_MAMBA_SIZES = tuple(
    Field(f"mamba.{ours}", theirs)
    for ours, theirs in {
        "expand": "mamba_expand",
        "state_size": "mamba_d_state",
        "convolution": "mamba_d_conv",
        "rank": "mamba_dt_rank",
        "convolution_bias": "mamba_conv_bias",
        "bias": "mamba_proj_bias",
    }.items()
)
ZAMBA = Architecture(
    "zamba",
    "ZambaForCausalLM",
    tables.ZAMBA,
    fields=(
        Field("hidden_size", "hidden_size"),
        Field("vocab_size", "vocab_size"),
        rms(),
        *_MAMBA_SIZES,
        Field("mamba.heads", "n_mamba_heads"),
        Field("mamba.time_step_low", "time_step_min"),
        Field("mamba.time_step_high", "time_step_max"),
        Field("mamba.time_step_floor", "time_step_floor"),
        Field(f"{_SHARED}.heads", "num_attention_heads"),
        Field(f"{_SHARED}.kv_heads", "num_key_value_heads"),
        Field(f"{_SHARED}.head_dim", "attention_head_dim"),
        Field(f"{_SHARED}.mlp.hidden_size", "intermediate_size"),
        Field(f"{_SHARED}.mlp.activation", "hidden_act", ACTIVATIONS, ALSO),
    ),
    # as for Zamba2, shared blocks are tied where the embedding is
    fixed={
        **_BARE,
        "embedding.tied": True,
        "mamba.inner_norms": False,
        f"{_SHARED}.blocks": 1,
        f"{_SHARED}.adapter_rank": 0,
        f"{_SHARED}.position": "none",
        f"{_SHARED}.mlp.gated": True,
        f"{_SHARED}.mlp.bias": False,
    },
    required={"tie_word_embeddings": True, "hidden_mamba_act": "silu"},
    rotary="none",
    block="mamba",
    hybrid=zamba.ZAMBA,
)

JAMBA = Architecture(
    "jamba",
    "JambaForCausalLM",
    jamba.LINKS,
    fields=(
        *experts("intermediate_size", "num_experts"),
        Field("mlp.hidden_size", "intermediate_size"),
        *_MAMBA_SIZES,
        activation("hidden_act"),
    ),
    fixed={
        **MOE_FIXED,
        "attention.position": "none",
        "attention.qkv_bias": False,
        "attention.output_bias": False,
        "moe.router.normalize": False,
        "mlp.gated": True,
        "mlp.bias": False,
        "mamba.heads": 1,
        "mamba.inner_norms": True,
    },
    required={"hidden_act": "silu"},
    rotary="none",
    block="mamba/moe",
    hybrid=jamba.HYBRID,
)

BAMBA = Architecture(
    "bamba",
    "BambaForCausalLM",
    tables.BAMBA,
    fields=(
        *LLAMA_SIZES,
        QKV_BIAS,
        OUTPUT_BIAS,
        Field("mlp.bias", "mlp_bias"),
        Field("mamba2.expand", "mamba_expand"),
        Field("mamba2.state_size", "mamba_d_state"),
        Field("mamba2.convolution", "mamba_d_conv"),
        Field("mamba2.groups", "mamba_n_groups"),
        Field("mamba2.convolution_bias", "mamba_conv_bias"),
        Field("mamba2.bias", "mamba_proj_bias"),
    ),
    fixed=LLAMA_FIXED,
    required={"hidden_act": "silu"},
    rotary="partial",
    hybrid=hybrids.BAMBA,
)

RWKV = Architecture(
    "rwkv",
    "RwkvForCausalLM",
    tables.RWKV,
    fields=(
        Field("hidden_size", "attention_hidden_size"),
        Field("hidden_size", "hidden_size"),
        Field("vocab_size", "vocab_size"),
        Field("embedding.tied", "tie_word_embeddings"),
        Field("rwkv4_ffn.hidden_size", "intermediate_size"),
    ),
    fixed={
        "norm.type": "layernorm",
        "norm.bias": True,
        "residual.form": "sequential",
        "residual.norm": "pre",
        "embedding.norm": True,
        "embedding.position": "none",
        "norm.epsilon": 1e-5,
    },
    # transformers' last norm has this epsilon whatever the configuration says
    required={"layer_norm_epsilon": 1e-5},
    rotary="none",
    block="rwkv4/rwkv4_ffn",
    prefix="rwkv.",
    buffers=(),
    reads=singular.read_rwkv,
    writes=singular.write_rwkv,
)

ZAYA = Architecture(
    "zaya",
    "ZayaForCausalLM",
    zaya.LINKS,
    fields=(*(Field(ours, theirs) for ours, theirs in zaya.FIELDS.items()), activation("hidden_act", "moe")),
    fixed=zaya.FIXED,
    rotary="none",
    block="cca/moe",
    hybrid=zaya.HYBRID,
    reads=singular.read_zaya,
)

ARCHITECTURES = {
    each.name: each
    for each in (
        GPT_NEOX,
        LLAMA,
        MISTRAL,
        QWEN3,
        OLMO2,
        *llamas.ALL,
        OLMO_HYBRID,
        GPT2,
        MAMBA,
        MAMBA2,
        MIXTRAL,
        QWEN2_MOE,
        QWEN3_MOE,
        OLMOE,
        ZAMBA,
        ZAMBA2,
        BAMBA,
        JAMBA,
        ZAYA,
        RWKV,
    )
}
