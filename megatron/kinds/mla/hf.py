"""The tensors of multi-head latent attention by the names of transformers' models (DeepSeek-V2 and V3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.links import Link

OURS = "layers.{n}.mla"


@dataclass(frozen=True)
class RotatedChannels:
    """Of each head their rows are `kept` channels, then `turned` ones, of which neighbours are a pair. Ours are the
    same, with the halves of a pair half of them apart.

    Attributes:
        first: whether the turned ones are the first here.
    """

    kept: int
    turned: int
    first: bool

    def to_hf(self, ours: list[Tensor]) -> list[Tensor]:
        heads = ours[0].unflatten(0, (-1, self.kept + self.turned))
        if self.first:
            turned, kept = heads.split([self.turned, self.kept], 1)
        else:
            kept, turned = heads.split([self.kept, self.turned], 1)
        pairs = turned.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return [torch.cat([kept, pairs], 1).flatten(0, 1)]

    def from_hf(self, theirs: list[Tensor]) -> list[Tensor]:
        heads = theirs[0].unflatten(0, (-1, self.kept + self.turned))
        kept, pairs = heads.split([self.kept, self.turned], 1)
        turned = pairs.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        return [torch.cat([turned, kept] if self.first else [kept, turned], 1).flatten(0, 1)]


def _queries(model: ModelSection) -> RotatedChannels:
    return RotatedChannels(model.mla.nope_dim, model.mla.rope_dim, first=True)


def _compressed(model: ModelSection) -> RotatedChannels:
    return RotatedChannels(model.mla.kv_rank, model.mla.rope_dim, first=False)


def queries(theirs: str, compressed: bool) -> tuple[Link, ...]:
    """The queries; `theirs` is the mixer's module. Those of the stream itself have a matrix of another name."""
    if not compressed:
        return (Link(f"{OURS}.query", f"{theirs}.q_proj", _queries),)
    return (
        Link(f"{OURS}.query_down", f"{theirs}.q_a_proj"),
        Link(f"{OURS}.query_norm", f"{theirs}.q_a_layernorm"),
        Link(f"{OURS}.query", f"{theirs}.q_b_proj", _queries),
    )


def mixer(theirs: str) -> tuple[Link, ...]:
    """The mixer but for its queries; `theirs` is its module."""
    return (
        Link(f"{OURS}.kv_down", f"{theirs}.kv_a_proj_with_mqa", _compressed),
        Link(f"{OURS}.kv_norm", f"{theirs}.kv_a_layernorm"),
        Link(f"{OURS}.key_value", f"{theirs}.kv_b_proj"),
        Link(f"{OURS}.output", f"{theirs}.o_proj"),
    )
