"""Tensors of Mamba and Mamba-2 layers by the names of transformers' models."""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.links import Form, Link, one, stacked, tensors
from megatron.kinds.mamba.options import inner_channels

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


def _widths(model: ModelSection) -> tuple[int, int, int]:
    """Numbers of inner channels, of channels of B and C together, and of heads."""
    own = model.mamba2
    inner = inner_channels(own, model.hidden_size)
    return inner, 2 * own.groups * own.state_size, inner // own.head_dim


def projection(model: ModelSection) -> Form:
    """Our z and x, B and C, and time steps are their one matrix."""
    inner, read, heads = _widths(model)
    return stacked(2 * inner, read, heads)


def convolution(model: ModelSection) -> Form:
    """Our convolutions of x, and of B and C, are their one."""
    inner, read, _ = _widths(model)
    return stacked(inner, read)


def mixer2(theirs: str, ours: str = "layers.{n}.mamba2") -> tuple[Link, ...]:
    """A Mamba-2 mixer, of module `theirs`."""
    return (
        *tensors(ours, theirs, "A_log", "D", "dt_bias"),
        Link(tuple(f"{ours}.{each}" for each in ("zx", "bc", "dt")), f"{theirs}.in_proj", projection),
        Link((f"{ours}.x_conv", f"{ours}.bc_conv"), f"{theirs}.conv1d", convolution),
        Link(f"{ours}.norm", f"{theirs}.norm"),
        Link(f"{ours}.output", f"{theirs}.out_proj"),
    )
