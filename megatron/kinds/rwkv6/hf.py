"""An RWKV-6 block by the names of the published files."""

from __future__ import annotations

from megatron.kinds.common.links import SAME, Link, transposed
from megatron.kinds.common.rwkv.hf import PUBLISHED, by_head, matrices, tensor, wide
from megatron.kinds.rwkv_ffn import hf as rwkv_ffn


def published() -> tuple[Link, ...]:
    """The time mix, with the channel mix of the same generation."""
    return (
        *matrices("rwkv6", f"{PUBLISHED}.att", "receptance", "key", "value", "gate", "output"),
        Link("layers.{n}.rwkv6.norm", f"{PUBLISHED}.att.ln_x"),
        *rwkv_ffn.published_ffn("rwkv6"),
        tensor("rwkv6.mix_all", ("att.time_maa_x",), wide()),
        tensor("rwkv6.mix", tuple(f"att.time_maa_{name}" for name in "wkvrg"), wide()),
        tensor("rwkv6.mix_down.weight", "att.time_maa_w1", transposed()),
        tensor("rwkv6.mix_up", "att.time_maa_w2", SAME),
        tensor("rwkv6.decay", "att.time_decay", wide(rows=False)),
        tensor("rwkv6.move.down.weight", "att.time_decay_w1", transposed()),
        tensor("rwkv6.move.up.weight", "att.time_decay_w2", transposed()),
        tensor("rwkv6.bonus", "att.time_faaaa", by_head("rwkv6")),
        rwkv_ffn.published_mix("rwkv6"),
    )
