"""A Mamba layer's tensors by the names of transformers' models."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.links import Form, Link, one, tensors

OURS = "layers.{n}.mamba"


def _swap(tensor: Tensor) -> Tensor:
    return torch.cat(tensor.chunk(2)[::-1])


SWAPPED = one(_swap, _swap)  # two equally large parts of one tensor, in the other order
INTERLEAVED = one(  # our z and x, one below the other, are their one tensor of a row of x, a row of z, and so on
    lambda ours: torch.stack(ours.chunk(2)[::-1], 1).flatten(0, 1),
    lambda theirs: torch.cat([theirs[1::2], theirs[::2]]),
)


def mixer(theirs: str) -> tuple[Link, ...]:
    """A mixer of one head, of module `theirs`."""
    return (
        *tensors(OURS, theirs, "A_log", "D"),
        Link(f"{OURS}.dt_bias", f"{theirs}.dt_proj.bias", suffixes=("",)),
        Link(f"{OURS}.zx", f"{theirs}.in_proj", SWAPPED),
        Link(f"{OURS}.x_conv", f"{theirs}.conv1d"),
        Link(f"{OURS}.dt_bc", f"{theirs}.x_proj"),
        Link(f"{OURS}.dt", f"{theirs}.dt_proj"),
        Link(f"{OURS}.output", f"{theirs}.out_proj"),
    )


def inner_norms(theirs: str) -> tuple[Link, ...]:
    """Jamba's norms of time steps, B and C."""
    names = {"dt_norm": "dt_layernorm", "B_norm": "b_layernorm", "C_norm": "c_layernorm"}
    return tuple(Link(f"{OURS}.{ours}", f"{theirs}.{each}") for ours, each in names.items())


def _by_head(dim: int) -> Callable[[ModelSection], Form]:
    """Our channels, along `dim`, are theirs [heads, ...], by head."""
    return lambda model: one(
        lambda ours: torch.stack(ours.chunk(model.mamba.heads, dim)), lambda theirs: torch.cat(list(theirs), dim)
    )


def mixer_of_heads(theirs: str, ours: str = OURS) -> tuple[Link, ...]:
    """Zamba's mixer, of several heads, of module `theirs`."""
    by_head = {"A_log": "A_log", "D": "D", "dt_bias": "dt_proj_bias", "dt.weight": "dt_proj_weight"}
    return (
        Link(f"{ours}.zx", f"{theirs}.in_proj", INTERLEAVED),
        Link(f"{ours}.x_conv", f"{theirs}.conv1d"),
        *(Link(f"{ours}.{mine}", f"{theirs}.{each}", _by_head(0), suffixes=("",)) for mine, each in by_head.items()),
        Link(f"{ours}.dt_bc.weight", f"{theirs}.x_proj_weight", _by_head(1), suffixes=("",)),
        Link(f"{ours}.output", f"{theirs}.out_proj"),
    )
