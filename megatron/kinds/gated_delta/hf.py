"""A gated delta layer's tensors by the names of transformers' models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.links import Fused, Link, tensors


@dataclass(frozen=True)
class Convolutions:
    """Our two, of queries and keys and of values, are their three.

    transformers cuts what it saves into three equal parts, whatever the widths, and joins them when it loads: so what
    is read is joined first.

    Args:
        rows: channels of queries and keys together, and of values.
    """

    rows: tuple[int, int]
    any_cut: ClassVar[bool] = True

    def to_hf(self, ours: list[Tensor]) -> list[Tensor]:
        return [*ours[0].chunk(2), ours[1]]

    def from_hf(self, theirs: list[Tensor]) -> list[Tensor]:
        return list(torch.cat(theirs).split(list(self.rows)))


def convolutions(model: ModelSection) -> Convolutions:
    own = model.gated_delta
    return Convolutions((2 * own.key_heads * own.key_dim, own.heads * own.value_dim))


def mixer(ours: str, theirs: str) -> tuple[Link, ...]:
    """The mixer of OLMo Hybrid; the arguments are the two modules."""
    pairs = {"query_key": "qk", "value_gate": "vg", "decay_beta": "ab"}
    return (
        *(
            Link(f"{ours}.{name}", tuple(f"{theirs}.{each}_proj" for each in both), Fused())
            for name, both in pairs.items()
        ),
        *tensors(ours, theirs, "A_log", "dt_bias"),
        Link(
            (f"{ours}.query_key_conv", f"{ours}.value_conv"),
            tuple(f"{theirs}.{each}_conv1d" for each in "qkv"),
            convolutions,
        ),
        Link(f"{ours}.norm", f"{theirs}.o_norm"),
        Link(f"{ours}.output", f"{theirs}.o_proj"),
    )
