"""An RWKV-7 block by the names of the published files."""

from __future__ import annotations

from megatron.kinds.common.links import Link, transposed
from megatron.kinds.common.rwkv.hf import PUBLISHED, by_head, matrices, tensor, wide
from megatron.kinds.rwkv_ffn import hf as rwkv_ffn

_LOW = {"decay": "w", "rate": "a", "blend": "v", "gate": "g"}
_VECTORS = {"decay_base": "w0", "rate_base": "a0", "blend_base": "v0", "key_scale": "k_k", "rate_scale": "k_a"}


def published() -> tuple[Link, ...]:
    """The time mix, with the channel mix of the same generation."""
    return (
        *matrices("rwkv7", f"{PUBLISHED}.att", "receptance", "key", "value", "output"),
        Link("layers.{n}.rwkv7.norm", f"{PUBLISHED}.att.ln_x"),
        *rwkv_ffn.published_ffn("rwkv7"),
        tensor("rwkv7.mix", tuple(f"att.x_{name}" for name in "rwkvag"), wide()),
        rwkv_ffn.published_mix("rwkv7"),
        *(tensor(f"rwkv7.{ours}", f"att.{theirs}", wide(rows=False)) for ours, theirs in _VECTORS.items()),
        *(
            tensor(f"rwkv7.{ours}.{part}.weight", f"att.{theirs}{number}", transposed())
            for ours, theirs in _LOW.items()
            for part, number in (("down", 1), ("up", 2))
        ),
        tensor("rwkv7.bonus", "att.r_k", by_head("rwkv7")),
    )
