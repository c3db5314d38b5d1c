"""An RWKV-4 time mix by the names of transformers' Rwkv."""

from __future__ import annotations

from megatron.kinds.common.links import SAME, Link
from megatron.kinds.common.rwkv.hf import matrices, tensor, wide


def mix(block: str) -> Link:
    """The token shift of their block."""
    return tensor(
        "rwkv4.mix", tuple(f"attention.time_mix_{name}" for name in ("key", "value", "receptance")), wide(), block
    )


def mixer(block: str) -> tuple[Link, ...]:
    """All other tensors."""
    return (
        tensor("rwkv4.decay", "attention.time_decay", SAME, block),
        tensor("rwkv4.bonus", "attention.time_first", SAME, block),
        *matrices("rwkv4", f"{block}.attention", "key", "value", "receptance", "output"),
    )
