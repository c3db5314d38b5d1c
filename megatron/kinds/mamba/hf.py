"""A Mamba layer's tensors by the names of transformers' models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.links import Link, tensors

OURS = "layers.{n}.mamba"


@dataclass(frozen=True)
class Swapped:
    """Two equally large parts of one tensor, in the other order."""

    def to_hf(self, ours: list[Tensor]) -> list[Tensor]:
        return [torch.cat(ours[0].chunk(2)[::-1])]

    def from_hf(self, theirs: list[Tensor]) -> list[Tensor]:
        return self.to_hf(theirs)


@dataclass(frozen=True)
class Interleaved:
    """Our z and x, one below the other, are their one tensor of a row of x, a row of z, and so on."""

    def to_hf(self, ours: list[Tensor]) -> list[Tensor]:
        return [torch.stack(ours[0].chunk(2)[::-1], 1).flatten(0, 1)]

    def from_hf(self, theirs: list[Tensor]) -> list[Tensor]:
        return [torch.cat([theirs[0][1::2], theirs[0][::2]])]


@dataclass(frozen=True)
class Heads:
    """Our channels, along `dim`, are theirs [heads, ...], by head."""

    heads: int
    dim: int

    def to_hf(self, ours: list[Tensor]) -> list[Tensor]:
        return [torch.stack(ours[0].chunk(self.heads, self.dim))]

    def from_hf(self, theirs: list[Tensor]) -> list[Tensor]:
        return [torch.cat(list(theirs[0]), self.dim)]


def mixer(theirs: str) -> tuple[Link, ...]:
    """A mixer of one head; `theirs` is its module."""
    return (
        *tensors(OURS, theirs, "A_log", "D"),
        Link(f"{OURS}.dt_bias", f"{theirs}.dt_proj.bias", suffixes=("",)),
        Link(f"{OURS}.zx", f"{theirs}.in_proj", Swapped()),
        Link(f"{OURS}.x_conv", f"{theirs}.conv1d"),
        Link(f"{OURS}.dt_bc", f"{theirs}.x_proj"),
        Link(f"{OURS}.dt", f"{theirs}.dt_proj"),
        Link(f"{OURS}.output", f"{theirs}.out_proj"),
    )


def inner_norms(theirs: str) -> tuple[Link, ...]:
    """Jamba's norms of time steps, B and C."""
    names = {"dt_norm": "dt_layernorm", "B_norm": "b_layernorm", "C_norm": "c_layernorm"}
    return tuple(Link(f"{OURS}.{ours}", f"{theirs}.{each}") for ours, each in names.items())


def _by_head(dim: int) -> Callable[[ModelSection], Heads]:
    return lambda model: Heads(model.mamba.heads, dim)


def mixer_of_heads(theirs: str, ours: str = OURS) -> tuple[Link, ...]:
    """Zamba's mixer, of several heads; `theirs` is its module."""
    by_head = {"A_log": "A_log", "D": "D", "dt_bias": "dt_proj_bias", "dt.weight": "dt_proj_weight"}
    return (
        Link(f"{ours}.zx", f"{theirs}.in_proj", Interleaved()),
        Link(f"{ours}.x_conv", f"{theirs}.conv1d"),
        *(Link(f"{ours}.{mine}", f"{theirs}.{each}", _by_head(0), suffixes=("",)) for mine, each in by_head.items()),
        Link(f"{ours}.dt_bc.weight", f"{theirs}.x_proj_weight", _by_head(1), suffixes=("",)),
        Link(f"{ours}.output", f"{theirs}.out_proj"),
    )
