"""Forms of tensors that the RWKV kinds share: vectors are [1, 1, C] or [heads, head_dim] in other programs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.links import Form, Link, one

PUBLISHED = "blocks.{n}"  # a block in the published files


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
