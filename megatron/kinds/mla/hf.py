"""The tensors of multi-head latent attention by the names of transformers' models (DeepSeek-V2 and V3)."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.config.sections.model import ModelSection
from megatron.kinds.attention.hf import halves, neighbours
from megatron.kinds.common.links import Form, Link, one

OURS = "layers.{n}.mla"


def _rotated(kept: int, turned: int, first: bool) -> Form:
    """Of each head their rows are `kept` channels, then `turned` ones, in pairs of neighbours.

    Ours are the same, with the two channels of a pair half of the turned ones apart.

    Args:
        first: whether the turned ones come first here.
    """
    widths = [turned, kept] if first else [kept, turned]

    def to_hf(ours: Tensor) -> Tensor:
        parts = ours.unflatten(0, (-1, kept + turned)).split(widths, 1)
        return torch.cat([parts[first], neighbours(parts[not first])], 1).flatten(0, 1)

    def from_hf(theirs: Tensor) -> Tensor:
        before, pairs = theirs.unflatten(0, (-1, kept + turned)).split([kept, turned], 1)
        return torch.cat([halves(pairs), before] if first else [before, halves(pairs)], 1).flatten(0, 1)

    return one(to_hf, from_hf)


def _queries(model: ModelSection) -> Form:
    return _rotated(model.mla.nope_dim, model.mla.rope_dim, first=True)


def _compressed(model: ModelSection) -> Form:
    return _rotated(model.mla.kv_rank, model.mla.rope_dim, first=False)


def queries(theirs: str, compressed: bool) -> tuple[Link, ...]:
    """The queries of mixer `theirs`, whose matrix has another name where it reads the stream."""
    if not compressed:
        return (Link(f"{OURS}.query", f"{theirs}.q_proj", _queries),)
    return (
        Link(f"{OURS}.query_down", f"{theirs}.q_a_proj"),
        Link(f"{OURS}.query_norm", f"{theirs}.q_a_layernorm"),
        Link(f"{OURS}.query", f"{theirs}.q_b_proj", _queries),
    )


def mixer(theirs: str) -> tuple[Link, ...]:
    """The mixer of module `theirs`, without its queries."""
    return (
        Link(f"{OURS}.kv_down", f"{theirs}.kv_a_proj_with_mqa", _compressed),
        Link(f"{OURS}.kv_norm", f"{theirs}.kv_a_layernorm"),
        Link(f"{OURS}.key_value", f"{theirs}.kv_b_proj"),
        Link(f"{OURS}.output", f"{theirs}.o_proj"),
    )
