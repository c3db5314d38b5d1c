"""RWKV layers by the names of transformers' Rwkv (RWKV-4) and of the published files (RWKV-5, 6 and 7)."""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.links import SAME, Form, Link, one, transposed

PUBLISHED = "blocks.{n}"  # a block in the published files
_LOW = {"decay": "w", "rate": "a", "blend": "v", "gate": "g"}
_VECTORS = {"decay_base": "w0", "rate_base": "a0", "blend_base": "v0", "key_scale": "k_k", "rate_scale": "k_a"}


def wide(rows: bool = True) -> Form:
    """Our rows of vectors are their tensors [1, 1, C], one each. Without `rows` our tensor is one vector."""

    def from_hf(theirs: list[Tensor]) -> list[Tensor]:
        flat = [each.flatten() for each in theirs]
        return [torch.stack(flat)] if rows else flat

    return Form(lambda ours: [row.view(1, 1, -1) for row in (ours[0] if rows else ours)], from_hf)


def by_head(kind: str) -> Callable[[ModelSection], Form]:
    """Our vector is their [heads, head_dim]."""
    return lambda model: one(lambda ours: ours.view(-1, getattr(model, kind).head_dim), Tensor.flatten)


def tensor(
    ours: str, theirs: str | tuple[str, ...], form: Form | Callable[[ModelSection], Form], block: str = PUBLISHED
) -> Link:
    """One tensor of a layer, which is one or several in `block` of theirs."""
    names = (theirs,) if isinstance(theirs, str) else theirs
    return Link(f"layers.{{n}}.{ours}", tuple(f"{block}.{name}" for name in names), form, suffixes=("",))


def matrices(kind: str, theirs: str, *names: str) -> tuple[Link, ...]:
    """Matrices of module `theirs` that have the same names on both sides."""
    return tuple(Link(f"layers.{{n}}.{kind}.{name}", f"{theirs}.{name}") for name in names)


def transformers_mixes(block: str) -> tuple[Link, ...]:
    """The token shifts of RWKV-4's `block`."""
    time, channel = ("key", "value", "receptance"), ("key", "receptance")
    return (
        tensor("rwkv4.mix", tuple(f"attention.time_mix_{name}" for name in time), wide(), block),
        tensor("rwkv4_ffn.mix", tuple(f"feed_forward.time_mix_{name}" for name in channel), wide(), block),
    )


def transformers_block(block: str) -> tuple[Link, ...]:
    """All other tensors of RWKV-4's time mix and channel mix."""
    return (
        tensor("rwkv4.decay", "attention.time_decay", SAME, block),
        tensor("rwkv4.bonus", "attention.time_first", SAME, block),
        *matrices("rwkv4", f"{block}.attention", "key", "value", "receptance", "output"),
        *matrices("rwkv4_ffn", f"{block}.feed_forward", "key", "value", "receptance"),
    )


def _published(kind: str, columns: tuple[str, ...], mixes: tuple[str, ...]) -> tuple[Link, ...]:
    """The matrices of both mixes, the norm, and the channel mix's token shift."""
    return (
        *matrices(kind, f"{PUBLISHED}.att", *columns),
        Link(f"layers.{{n}}.{kind}.norm", f"{PUBLISHED}.att.ln_x"),
        *matrices(f"{kind}_ffn", f"{PUBLISHED}.ffn", "key", "value", "receptance"),
        tensor(f"{kind}_ffn.mix", tuple(f"ffn.{name}" for name in mixes), wide()),
    )


def published_rwkv5() -> tuple[Link, ...]:
    """The time mix and the channel mix, by the names of the published files. So do the functions below."""
    return (
        *_published("rwkv5", ("receptance", "key", "value", "gate", "output"), ("time_mix_k", "time_mix_r")),
        tensor("rwkv5.mix", tuple(f"att.time_mix_{name}" for name in "kvrg"), wide()),
        tensor("rwkv5.decay", "att.time_decay", by_head("rwkv5")),
        tensor("rwkv5.bonus", "att.time_faaaa", by_head("rwkv5")),
    )


def published_rwkv6() -> tuple[Link, ...]:
    return (
        *_published("rwkv6", ("receptance", "key", "value", "gate", "output"), ("time_maa_k", "time_maa_r")),
        tensor("rwkv6.mix_all", ("att.time_maa_x",), wide()),
        tensor("rwkv6.mix", tuple(f"att.time_maa_{name}" for name in "wkvrg"), wide()),
        tensor("rwkv6.mix_down.weight", "att.time_maa_w1", transposed()),
        tensor("rwkv6.mix_up", "att.time_maa_w2", SAME),
        tensor("rwkv6.decay", "att.time_decay", wide(rows=False)),
        tensor("rwkv6.move.down.weight", "att.time_decay_w1", transposed()),
        tensor("rwkv6.move.up.weight", "att.time_decay_w2", transposed()),
        tensor("rwkv6.bonus", "att.time_faaaa", by_head("rwkv6")),
    )


def published_rwkv7() -> tuple[Link, ...]:
    return (
        *_published("rwkv7", ("receptance", "key", "value", "output"), ("x_k",)),
        tensor("rwkv7.mix", tuple(f"att.x_{name}" for name in "rwkvag"), wide()),
        *(tensor(f"rwkv7.{ours}", f"att.{theirs}", wide(rows=False)) for ours, theirs in _VECTORS.items()),
        *(
            tensor(f"rwkv7.{ours}.{part}.weight", f"att.{theirs}{number}", transposed())
            for ours, theirs in _LOW.items()
            for part, number in (("down", 1), ("up", 2))
        ),
        tensor("rwkv7.bonus", "att.r_k", by_head("rwkv7")),
    )
