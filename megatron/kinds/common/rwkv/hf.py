"""Forms of tensors that the RWKV kinds share: vectors are [1, 1, C] or [heads, head_dim] in other programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.links import Form, Link

PUBLISHED = "blocks.{n}"  # a block in the published files


@dataclass(frozen=True)
class Wide:
    """Our rows of vectors are their tensors [1, 1, C], one each; one row may be a vector of ours."""

    rows: bool = True

    def to_hf(self, ours: list[Tensor]) -> list[Tensor]:
        return [row.view(1, 1, -1) for row in (ours[0] if self.rows else ours)]

    def from_hf(self, theirs: list[Tensor]) -> list[Tensor]:
        flat = [each.flatten() for each in theirs]
        return [torch.stack(flat)] if self.rows else flat


@dataclass(frozen=True)
class VectorByHead:
    """Our vector is their [heads, head_dim]."""

    head_dim: int

    def to_hf(self, ours: list[Tensor]) -> list[Tensor]:
        return [ours[0].view(-1, self.head_dim)]

    def from_hf(self, theirs: list[Tensor]) -> list[Tensor]:
        return [theirs[0].flatten()]


def by_head(kind: str) -> Callable[[ModelSection], VectorByHead]:
    return lambda model: VectorByHead(getattr(model, kind).head_dim)


def tensor(
    ours: str, theirs: str | tuple[str, ...], form: Form | Callable[[ModelSection], Form], block: str = PUBLISHED
) -> Link:
    """One tensor of a layer, which is one or several in `block` of theirs."""
    names = (theirs,) if isinstance(theirs, str) else theirs
    return Link(f"layers.{{n}}.{ours}", tuple(f"{block}.{name}" for name in names), form, suffixes=("",))


def matrices(kind: str, theirs: str, *names: str) -> tuple[Link, ...]:
    """Matrices that have one name on both sides; `theirs` is the module."""
    return tuple(Link(f"layers.{{n}}.{kind}.{name}", f"{theirs}.{name}") for name in names)
