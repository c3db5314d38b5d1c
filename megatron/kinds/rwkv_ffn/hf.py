"""RWKV's channel mix by the names of transformers' Rwkv (RWKV-4) and of the published files (RWKV-5, 6 and 7)."""

from __future__ import annotations

from megatron.kinds.common.links import Link
from megatron.kinds.common.rwkv.hf import PUBLISHED, matrices, tensor, wide

_MIXES = {  # of the published files
    "rwkv5": ("time_mix_k", "time_mix_r"),
    "rwkv6": ("time_maa_k", "time_maa_r"),
    "rwkv7": ("x_k",),
}


def transformers_mix(block: str) -> Link:
    """RWKV-4's token shift, of their block."""
    return tensor(
        "rwkv4_ffn.mix", tuple(f"feed_forward.time_mix_{name}" for name in ("key", "receptance")), wide(), block
    )


def transformers_ffn(block: str) -> tuple[Link, ...]:
    """RWKV-4's matrices."""
    return matrices("rwkv4_ffn", f"{block}.feed_forward", "key", "value", "receptance")


def published_mix(generation: str) -> Link:
    """The token shift of "rwkv5", "rwkv6" or "rwkv7"."""
    return tensor(f"{generation}_ffn.mix", tuple(f"ffn.{name}" for name in _MIXES[generation]), wide())


def published_ffn(generation: str) -> tuple[Link, ...]:
    """The matrices of "rwkv5", "rwkv6" or "rwkv7"."""
    return matrices(f"{generation}_ffn", f"{PUBLISHED}.ffn", "key", "value", "receptance")
