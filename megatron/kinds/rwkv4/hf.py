"""An RWKV-4 time mix by the names of transformers' Rwkv."""

from __future__ import annotations

from megatron.kinds.common.links import Link, Same
from megatron.kinds.common.rwkv.hf import Wide, matrices, tensor


def mix(block: str) -> Link:
    """The token shift; `block` is the block of theirs."""
    return tensor(
        "rwkv4.mix", tuple(f"attention.time_mix_{name}" for name in ("key", "value", "receptance")), Wide(), block
    )


def mixer(block: str) -> tuple[Link, ...]:
    """All else."""
    return (
        tensor("rwkv4.decay", "attention.time_decay", Same(), block),
        tensor("rwkv4.bonus", "attention.time_first", Same(), block),
        *matrices("rwkv4", f"{block}.attention", "key", "value", "receptance", "output"),
    )
