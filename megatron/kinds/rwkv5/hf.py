"""An RWKV-5 block by the names of the published files."""

from __future__ import annotations

from megatron.kinds.common.links import Link
from megatron.kinds.common.rwkv.hf import PUBLISHED, by_head, matrices, tensor, wide
from megatron.kinds.rwkv_ffn import hf as rwkv_ffn


def published() -> tuple[Link, ...]:
    """The time mix, with the channel mix of the same generation."""
    return (
        *matrices("rwkv5", f"{PUBLISHED}.att", "receptance", "key", "value", "gate", "output"),
        Link("layers.{n}.rwkv5.norm", f"{PUBLISHED}.att.ln_x"),
        *rwkv_ffn.published_ffn("rwkv5"),
        tensor("rwkv5.mix", tuple(f"att.time_mix_{name}" for name in "kvrg"), wide()),
        tensor("rwkv5.decay", "att.time_decay", by_head("rwkv5")),
        tensor("rwkv5.bonus", "att.time_faaaa", by_head("rwkv5")),
        rwkv_ffn.published_mix("rwkv5"),
    )
