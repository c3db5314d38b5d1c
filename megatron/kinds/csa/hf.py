"""The tensors of csa by the names in files of DeepSeek-V4.

Positions turn the last channels of a head there, in pairs of neighbours. Here they turn the first, half of them apart.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.config.sections.model import ModelSection
from megatron.kinds.attention.hf import halves, neighbours
from megatron.kinds.common.links import Form, Link

OURS = "layers.{n}.csa"


def _channels(width: str, dim: int = 0, joined: int = 1) -> Callable[[ModelSection], Form]:
    """Heads along a dimension, each of `csa.<width>` channels. Our one tensor is `joined` of theirs, one below the
    other."""

    def form(model: ModelSection) -> Form:
        own = model.csa
        kept, turned = getattr(own, width) - own.rope_dim, own.rope_dim

        def to_hf(ours: Tensor) -> Tensor:
            first, rest = ours.transpose(0, dim).unflatten(0, (-1, kept + turned)).split([turned, kept], 1)
            return torch.cat([rest, neighbours(first)], 1).flatten(0, 1).transpose(0, dim)

        def from_hf(theirs: Tensor) -> Tensor:
            rest, pairs = theirs.transpose(0, dim).unflatten(0, (-1, kept + turned)).split([kept, turned], 1)
            return torch.cat([halves(pairs), rest], 1).flatten(0, 1).transpose(0, dim)

        return Form(
            lambda ours: [to_hf(each) for each in ours[0].chunk(joined)],
            lambda theirs: [torch.cat([from_hf(each) for each in theirs])],
        )

    return form


def _compressor(ours: str, theirs: str, width: str) -> tuple[Link, ...]:
    return (
        Link(f"{ours}.project", (f"{theirs}.wkv", f"{theirs}.wgate"), _channels(width, joined=2)),
        Link(f"{ours}.bias", f"{theirs}.ape", _channels(width, dim=1), suffixes=("",)),
        Link(f"{ours}.norm", f"{theirs}.norm", _channels(width)),
    )


def mixer(theirs: str) -> tuple[Link, ...]:
    """The mixer of module `theirs`."""
    return (
        Link(f"{OURS}.query_down", f"{theirs}.wq_a"),
        Link(f"{OURS}.query_norm", f"{theirs}.q_norm"),
        Link(f"{OURS}.query", f"{theirs}.wq_b", _channels("head_dim")),
        Link(f"{OURS}.key", f"{theirs}.wkv", _channels("head_dim")),
        Link(f"{OURS}.key_norm", f"{theirs}.norm", _channels("head_dim")),
        Link(f"{OURS}.sinks", f"{theirs}.attn_sink", suffixes=("",)),
        Link(f"{OURS}.output_down", f"{theirs}.wo_a", _channels("head_dim", dim=1)),
        Link(f"{OURS}.output", f"{theirs}.wo_b"),
        *_compressor(f"{OURS}.compressor", f"{theirs}.compressor", "head_dim"),
        *_compressor(f"{OURS}.indexer.compressor", f"{theirs}.indexer.compressor", "index_dim"),
        Link(f"{OURS}.indexer.query", f"{theirs}.indexer.wq_b", _channels("index_dim")),
        Link(f"{OURS}.indexer.weigh", f"{theirs}.indexer.weights_proj"),
    )
