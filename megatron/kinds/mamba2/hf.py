"""A Mamba-2 layer's tensors by the names of transformers' models."""

from __future__ import annotations

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.links import Form, Link, stacked, tensors
from megatron.kinds.mamba2.options import inner_channels


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


def mixer(theirs: str, ours: str = "layers.{n}.mamba2") -> tuple[Link, ...]:
    """The mixer of module `theirs`."""
    return (
        *tensors(ours, theirs, "A_log", "D", "dt_bias"),
        Link(tuple(f"{ours}.{each}" for each in ("zx", "bc", "dt")), f"{theirs}.in_proj", projection),
        Link((f"{ours}.x_conv", f"{ours}.bc_conv"), f"{theirs}.conv1d", convolution),
        Link(f"{ours}.norm", f"{theirs}.norm"),
        Link(f"{ours}.output", f"{theirs}.out_proj"),
    )
