"""One table per architecture: which of our tensors are which of Hugging Face's, by their names on disk."""

from __future__ import annotations

from . import hybrids
from .links import Fused, Link, Mamba2Rows, QueryKeyValue, QueryKeyValueByHead, Stacked, Swapped, Transposed, Wide

_OURS, _LLAMA, _NEOX, _GPT2 = "layers.{n}", "model.layers.{n}", "gpt_neox.layers.{n}", "transformer.h.{n}"

GPT_NEOX = (
    Link("embedding.tokens", "gpt_neox.embed_in"),
    Link(f"{_OURS}.mixer_norm", f"{_NEOX}.input_layernorm"),
    Link(
        (f"{_OURS}.attention.query", f"{_OURS}.attention.key_value"),
        f"{_NEOX}.attention.query_key_value",
        QueryKeyValueByHead(),
    ),
    Link(f"{_OURS}.attention.output", f"{_NEOX}.attention.dense"),
    Link(f"{_OURS}.ffn_norm", f"{_NEOX}.post_attention_layernorm"),
    Link(f"{_OURS}.mlp.up", f"{_NEOX}.mlp.dense_h_to_4h"),
    Link(f"{_OURS}.mlp.down", f"{_NEOX}.mlp.dense_4h_to_h"),
    Link("final_norm", "gpt_neox.final_layer_norm"),
    Link("head", "embed_out"),
)

LLAMA_COMMON = (
    Link("embedding.tokens", "model.embed_tokens"),
    Link(f"{_OURS}.attention.query", f"{_LLAMA}.self_attn.q_proj"),
    Link(f"{_OURS}.attention.key_value", (f"{_LLAMA}.self_attn.k_proj", f"{_LLAMA}.self_attn.v_proj"), Fused()),
    Link(f"{_OURS}.attention.output", f"{_LLAMA}.self_attn.o_proj"),
    Link(f"{_OURS}.mlp.gate_up", (f"{_LLAMA}.mlp.gate_proj", f"{_LLAMA}.mlp.up_proj"), Fused()),
    Link(f"{_OURS}.mlp.down", f"{_LLAMA}.mlp.down_proj"),
    Link("final_norm", "model.norm"),
    Link("head", "lm_head"),
)
PRE_NORMS = (
    Link(f"{_OURS}.mixer_norm", f"{_LLAMA}.input_layernorm"),
    Link(f"{_OURS}.ffn_norm", f"{_LLAMA}.post_attention_layernorm"),
)
POST_NORMS = (
    Link(f"{_OURS}.mixer_norm", f"{_LLAMA}.post_attention_layernorm"),
    Link(f"{_OURS}.ffn_norm", f"{_LLAMA}.post_feedforward_layernorm"),
)
QK_NORMS = (
    Link(f"{_OURS}.attention.query_norm", f"{_LLAMA}.self_attn.q_norm"),
    Link(f"{_OURS}.attention.key_norm", f"{_LLAMA}.self_attn.k_norm"),
)

LLAMA = MISTRAL = LLAMA_COMMON + PRE_NORMS
QWEN3 = LLAMA_COMMON + PRE_NORMS + QK_NORMS
OLMO2 = LLAMA_COMMON + POST_NORMS + QK_NORMS
OLMO_HYBRID = LLAMA_COMMON + QK_NORMS


def _experts(theirs: str, gate: str, up: str, down: str) -> tuple[Link, ...]:
    """The router and the gated experts of each layer."""
    return (
        Link(f"{_OURS}.moe.router", f"{theirs}.gate"),
        Link(
            f"{_OURS}.moe.experts.gate_up",
            (f"{theirs}.experts.{{e}}.{gate}", f"{theirs}.experts.{{e}}.{up}"),
            Stacked(2),
        ),
        Link(f"{_OURS}.moe.experts.down", f"{theirs}.experts.{{e}}.{down}", Stacked()),
    )


LLAMA_MIXER = tuple(link for link in LLAMA_COMMON + PRE_NORMS if ".mlp." not in str(link.ours))
MIXTRAL = (*LLAMA_MIXER, *_experts(f"{_LLAMA}.block_sparse_moe", "w1", "w3", "w2"))
OLMOE = (*LLAMA_MIXER, *QK_NORMS, *_experts(f"{_LLAMA}.mlp", "gate_proj", "up_proj", "down_proj"))
_DENSE = tuple(link for link in LLAMA_COMMON if ".mlp." in str(link.ours))
QWEN3_MOE = (*OLMOE, *_DENSE)
_SHARED = f"{_LLAMA}.mlp.shared_expert"
QWEN2_MOE = (
    *(link for link in QWEN3_MOE if link not in QK_NORMS),
    Link(f"{_OURS}.moe.shared.gate_up", (f"{_SHARED}.gate_proj", f"{_SHARED}.up_proj"), Fused()),
    Link(f"{_OURS}.moe.shared.down", f"{_SHARED}.down_proj"),
    Link(f"{_OURS}.moe.shared.gate", f"{_LLAMA}.mlp.shared_expert_gate"),
)

GPT2 = (
    Link("embedding.tokens", "transformer.wte"),
    Link("embedding.positions", "transformer.wpe"),
    Link(f"{_OURS}.mixer_norm", f"{_GPT2}.ln_1"),
    Link(
        (f"{_OURS}.attention.query", f"{_OURS}.attention.key_value"),
        f"{_GPT2}.attn.c_attn",
        Transposed(QueryKeyValue()),
    ),
    Link(f"{_OURS}.attention.output", f"{_GPT2}.attn.c_proj", Transposed()),
    Link(f"{_OURS}.ffn_norm", f"{_GPT2}.ln_2"),
    Link(f"{_OURS}.mlp.up", f"{_GPT2}.mlp.c_fc", Transposed()),
    Link(f"{_OURS}.mlp.down", f"{_GPT2}.mlp.c_proj", Transposed()),
    Link("final_norm", "transformer.ln_f"),
    Link("head", "lm_head"),
)

_MAMBA = "backbone.layers.{n}"


def _tensors(ours: str, theirs: str, *names: str) -> tuple[Link, ...]:
    """Tensors of two modules with names of their own, the same on both sides."""
    return tuple(Link(f"{ours}.{name}", f"{theirs}.{name}", suffixes=("",)) for name in names)


_MAMBA_COMMON = (
    Link("embedding.tokens", "backbone.embeddings"),
    Link(f"{_OURS}.mixer_norm", f"{_MAMBA}.norm"),
    Link("final_norm", "backbone.norm_f"),
    Link("head", "lm_head"),
)


def mamba_mixer(theirs: str) -> tuple[Link, ...]:
    """A Mamba mixer; `theirs` is its module."""
    ours = f"{_OURS}.mamba"
    return (
        *_tensors(ours, theirs, "A_log", "D"),
        Link(f"{ours}.dt_bias", f"{theirs}.dt_proj.bias", suffixes=("",)),
        Link(f"{ours}.zx", f"{theirs}.in_proj", Swapped()),
        Link(f"{ours}.x_conv", f"{theirs}.conv1d"),
        Link(f"{ours}.dt_bc", f"{theirs}.x_proj"),
        Link(f"{ours}.dt", f"{theirs}.dt_proj"),
        Link(f"{ours}.output", f"{theirs}.out_proj"),
    )


MAMBA = (*_MAMBA_COMMON, *mamba_mixer(f"{_MAMBA}.mixer"))
MAMBA2 = (
    *_MAMBA_COMMON,
    *_tensors(f"{_OURS}.mamba2", f"{_MAMBA}.mixer", "A_log", "D", "dt_bias"),
    Link(tuple(f"{_OURS}.mamba2.{name}" for name in ("zx", "bc", "dt")), f"{_MAMBA}.mixer.in_proj", Mamba2Rows(True)),
    Link((f"{_OURS}.mamba2.x_conv", f"{_OURS}.mamba2.bc_conv"), f"{_MAMBA}.mixer.conv1d", Mamba2Rows(False)),
    Link(f"{_OURS}.mamba2.norm", f"{_MAMBA}.mixer.norm"),
    Link(f"{_OURS}.mamba2.output", f"{_MAMBA}.mixer.out_proj"),
)

_ENDS = (
    Link("embedding.tokens", "model.embed_tokens"),
    Link("final_norm", "model.final_layernorm"),
    Link("head", "lm_head"),
)
ZAMBA = ZAMBA2 = _ENDS  # their layers: see `zamba`
BAMBA = (
    *_ENDS,
    *hybrids.mamba2(_OURS, _LLAMA),
    Link(f"{_OURS}.ffn_norm", f"{_LLAMA}.pre_ff_layernorm"),
    *(link for link in LLAMA_COMMON if ".attention." in str(link.ours)),
    Link(f"{_OURS}.mlp.gate_up", (f"{_LLAMA}.feed_forward.gate_proj", f"{_LLAMA}.feed_forward.up_proj"), Fused()),
    Link(f"{_OURS}.mlp.down", f"{_LLAMA}.feed_forward.down_proj"),
)

_RWKV = "rwkv.blocks.{n}"


def _mixes(kind: str, theirs: str, *names: str) -> Link:
    return Link(
        f"{_OURS}.{kind}.mix", tuple(f"{_RWKV}.{theirs}.time_mix_{name}" for name in names), Wide(), suffixes=("",)
    )


RWKV = (
    Link("embedding.tokens", "rwkv.embeddings"),
    Link("embedding.norm", "rwkv.blocks.0.pre_ln"),
    Link(f"{_OURS}.mixer_norm", f"{_RWKV}.ln1"),
    Link(f"{_OURS}.ffn_norm", f"{_RWKV}.ln2"),
    _mixes("rwkv4", "attention", "key", "value", "receptance"),
    _mixes("rwkv4_ffn", "feed_forward", "key", "receptance"),
    Link(f"{_OURS}.rwkv4.decay", f"{_RWKV}.attention.time_decay", suffixes=("",)),
    Link(f"{_OURS}.rwkv4.bonus", f"{_RWKV}.attention.time_first", suffixes=("",)),
    *(Link(f"{_OURS}.rwkv4.{name}", f"{_RWKV}.attention.{name}") for name in ("key", "value", "receptance", "output")),
    *(Link(f"{_OURS}.rwkv4_ffn.{name}", f"{_RWKV}.feed_forward.{name}") for name in ("key", "value", "receptance")),
    Link("final_norm", "rwkv.ln_out"),
    Link("head", "head"),
)
