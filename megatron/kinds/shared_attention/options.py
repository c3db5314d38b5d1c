"""Options of shared_attention, which runs before a mixer, and their rules."""

from collections.abc import Iterator

from megatron.config.kind import KindUse, LayerKind
from megatron.config.problems import Problem
from megatron.config.section import Derivable, Needed, key
from megatron.kinds.attention.options import RULES, AttentionOptions, heads_fill
from megatron.kinds.common.options import derived_key, divides_over_tensor_ranks
from megatron.kinds.mlp.options import MLPOptions


class SharedMLPOptions(MLPOptions):
    hidden_size: Derivable[int] = derived_key(
        "Width of the MLP.",
        "4 * model.hidden_size",
        lambda own, at: 4 * at["model.hidden_size"] if at.uses("shared_attention") else None,
        "model.hidden_size",
        unit="channels",
    )
    gated: bool = key(True, "Gated form: activation(gate(x)) * up(x).")


class SharedAttentionOptions(AttentionOptions):
    blocks: int = key(1, "Number of blocks of shared weights, which the layers use in turn.", gt=0)
    adapter_rank: int = key(0, "Rank of each layer's addition to the shared MLP's first matrix (LoRA). 0: none.", ge=0)
    attention_adapters: bool = key(False, "Whether each layer adds to queries, keys and values, too.")
    mlp: SharedMLPOptions = key(SharedMLPOptions, "The MLP of a shared block.")
    heads: Needed[int] = key(None, "Number of query heads. Needed where the pattern has shared attention.", gt=0)
    kv_heads: Derivable[int] = derived_key(
        "Key/value heads (GQA, 1 is MQA).", "model.shared_attention.heads", lambda own, at: own["heads"], ".heads"
    )
    head_dim: Derivable[int] = derived_key(
        "Channels per head.",
        "2 * model.hidden_size / model.shared_attention.heads",
        lambda own, at: 2 * at["model.hidden_size"] // own["heads"] or None if own["heads"] else None,
        "model.hidden_size .heads",
        unit="channels",
    )
    scale: Derivable[float] = derived_key(
        "Multiplier of query-key products.",
        "(model.shared_attention.head_dim / 2) ** -0.5",
        lambda own, at: (own["head_dim"] / 2) ** -0.5 if own["head_dim"] else None,
        ".head_dim",
    )


def shared_blocks_are_used(at: KindUse[SharedAttentionOptions]) -> Iterator[Problem]:
    """A block of shared weights that no layer uses would have no gradient."""
    uses = [(each.name, each.variant) for block in at.context.blocks for each in block.kinds]
    calls = uses.count((at.kind, at.variant))
    if at.options.blocks > calls:
        yield at.problem(
            ".blocks model.layers",
            rule=f"each shared block must be used, and the pattern has {calls} of these layers",
            fix=f"use at most {calls} blocks",
        )


def attention_adapters_have_a_rank(at: KindUse[SharedAttentionOptions]) -> Iterator[Problem]:
    if at.options.attention_adapters and not at.options.adapter_rank:
        yield at.problem(
            ".adapter_rank .attention_adapters",
            rule="adapters of queries, keys and values must have a rank",
            fix="give adapter_rank (Zamba2 has 128), or use attention_adapters: false",
        )


def shared_blocks_have_keys(at: KindUse[SharedAttentionOptions]) -> Iterator[Problem]:
    if at.options.keys != "own":
        yield at.problem(".keys", rule="must be own: each layer makes keys with shared weights", fix="remove it")


def shared_logits_are_not_clipped(at: KindUse[SharedAttentionOptions]) -> Iterator[Problem]:
    if at.options.qk_clip is not None:
        yield at.problem(
            ".qk_clip",
            rule="must be null: several layers share these queries and keys, and add their own to them",
            fix="remove it, or use qk_norm: head",
        )


KIND = LayerKind(
    role="side",
    options=SharedAttentionOptions,
    about="Options of shared_attention, which runs before a mixer (Zamba, Glorioso et al. 2024).",
    layer="megatron.kinds.shared_attention.layer:SharedAttention",
    rules=(
        *RULES,
        heads_fill(twice=True),
        shared_blocks_are_used,
        attention_adapters_have_a_rank,
        divides_over_tensor_ranks(lambda at: at.options.mlp.hidden_size, "channels", ".mlp.hidden_size"),
        *(shared_logits_are_not_clipped, shared_blocks_have_keys),
    ),
    draws=lambda options: options.dropout > 0.0,
    context="attends",
    head_width=lambda options: options.head_dim,
)
