"""Collectives that autograd can see. Each is the identity where its axis has one rank.

A *tensor region* is the part of a layer in which each tensor parallel rank holds a slice of the channels. Outside of it
the residual stream is whole on every rank or, with sequence parallelism, cut along the sequence. `enter` and `leave`
begin and end a region. The backward pass of each is the forward pass of the other (Shoeybi et al. 2019, section 3,
Korthikanti et al. 2022, section 4.2).

Shapes: B batch, S sequence, H hidden, t the tensor parallel size."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..layout.mesh import Axis, Mesh
from ..messages.account import here
from ..transport.compression import gathered, scattered_sum, summed

NONE = "none"  # sent as it is


def all_reduce(x: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """The sum (or `op`) over the axis, not seen by autograd. Writes into `x` where it can."""
    if axis.size == 1:
        return x
    x = x.contiguous()
    dist.all_reduce(x, op=op, group=axis.group)
    return x


def _gather_sequence(x_BsH: Tensor, axis: Axis, wire: str = NONE) -> Tensor:
    """[B, S/t, H] to [B, S, H]."""
    x_sBH = x_BsH.transpose(0, 1).contiguous()
    if wire != NONE:
        return gathered(x_sBH, axis, wire).transpose(0, 1).contiguous()
    out_SBH = x_sBH.new_empty((x_sBH.shape[0] * axis.size, *x_sBH.shape[1:]))
    dist.all_gather_into_tensor(out_SBH, x_sBH, group=axis.group)
    return out_SBH.transpose(0, 1).contiguous()


def _scatter_sum_sequence(x_BSH: Tensor, axis: Axis, wire: str = NONE) -> Tensor:
    """[B, S, H] partial sums to this rank's [B, S/t, H] of the sum."""
    x_SBH = x_BSH.transpose(0, 1).contiguous()
    if wire != NONE:
        return scattered_sum(x_SBH, axis, wire).transpose(0, 1).contiguous()
    out_sBH = x_SBH.new_empty((x_SBH.shape[0] // axis.size, *x_SBH.shape[1:]))
    dist.reduce_scatter_tensor(out_sBH, x_SBH, group=axis.group)
    return out_sBH.transpose(0, 1).contiguous()


def _sum(x: Tensor, axis: Axis, wire: str) -> Tensor:
    return all_reduce(x.clone(), axis) if wire == NONE else summed(x, axis, wire)


def _same(x: Tensor, axis: Axis, wire: str) -> Tensor:
    return x.view_as(x)


Move = Callable[[Tensor, Axis, str], Tensor]


class _Moved(torch.autograd.Function):
    """`there` in the forward pass, `back` in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Move, back: Move, axis: Axis, wire: str = NONE) -> Tensor:
        ctx.back, ctx.axis, ctx.wire, ctx.layer = back, axis, wire, here()
        return there(x, axis, wire)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grad, ctx.axis, ctx.wire), None, None, None, None


COPY, REDUCE = (_same, _sum), (_sum, _same)
GATHER, SCATTER = (_gather_sequence, _scatter_sum_sequence), (_scatter_sum_sequence, _gather_sequence)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RH: Tensor, sent: list[int], received: list[int], axis: Axis) -> Tensor:
        ctx.sent, ctx.received, ctx.axis, ctx.layer = sent, received, axis, here()
        return _all_to_all(x_RH, sent, received, axis)

    @staticmethod
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad_RH, ctx.received, ctx.sent, ctx.axis), None, None, None


def _all_to_all(x_RH: Tensor, sent: list[int], received: list[int], axis: Axis) -> Tensor:
    out_RH = x_RH.new_empty((sum(received), *x_RH.shape[1:]))
    dist.all_to_all_single(out_RH, x_RH.contiguous(), received, sent, group=axis.group)
    return out_RH


def exchange(x_RH: Tensor, sent: list[int], received: list[int], axis: Axis) -> Tensor:
    """Send rows to other ranks, and receive theirs in the order of the ranks. Gradients return.

    Args:
        x_RH: rows in the order of the ranks that get them.
        sent: number of rows for each rank of the axis.
        received: number of rows from each rank.
    """
    return x_RH if axis.size == 1 else _Exchange.apply(x_RH, sent, received, axis)


def gather_rows(x_RH: Tensor, axis: Axis) -> Tensor:
    """The rows of all ranks, [t R, H]. The gradients of the ranks are summed. R is the same everywhere."""
    return x_RH if axis.size == 1 else _Moved.apply(x_RH.unsqueeze(0), *GATHER, axis).squeeze(0)


def gather_sequence(x_BsH: Tensor, axis: Axis) -> Tensor:
    """[B, s, ...] of all ranks along the second dimension. Their gradients are summed."""
    return x_BsH if axis.size == 1 else _Moved.apply(x_BsH, *GATHER, axis)


def scatter_rows(x_RH: Tensor, axis: Axis) -> Tensor:
    """This rank's share [R / t, H] of the sum of the ranks' rows."""
    return x_RH if axis.size == 1 else _Moved.apply(x_RH.unsqueeze(0), *SCATTER, axis).squeeze(0)


def enter(x: Tensor, mesh: Mesh) -> Tensor:
    """Into the tensor region: every rank gets the whole [B, S, H]. The gradients of the ranks are summed."""
    if mesh.tensor.size == 1:
        return x
    return _Moved.apply(x, *(GATHER if mesh.layout.sequence else COPY), mesh.tensor, mesh.layout.tensor_wire)


def leave(x: Tensor, mesh: Mesh) -> Tensor:
    """Out of the tensor region: the ranks' partial [B, S, H] are summed (and cut along the sequence)."""
    if mesh.tensor.size == 1:
        return x
    return _Moved.apply(x, *(SCATTER if mesh.layout.sequence else REDUCE), mesh.tensor, mesh.layout.tensor_wire)


def _gather_channels(x: Tensor, axis: Axis, wire: str) -> Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(axis.size)]
    dist.all_gather(parts, x.contiguous(), group=axis.group)
    return torch.cat(parts, -1)


def _split_channels(x: Tensor, axis: Axis, wire: str) -> Tensor:
    return x.chunk(axis.size, -1)[axis.rank].contiguous()


def gather_channels(x: Tensor, axis: Axis) -> Tensor:
    """The last dimension of all ranks, which all then use alike: each keeps its part of the gradient."""
    return x if axis.size == 1 else _Moved.apply(x, _gather_channels, _split_channels, axis)


def split_channels(x: Tensor, axis: Axis) -> Tensor:
    """This rank's part of the last dimension of a tensor that all have. The gradient is that of all parts."""
    return x if axis.size == 1 else _Moved.apply(x, _split_channels, _gather_channels, axis)


def sum_gradient(parameter: Tensor, axis: Axis) -> Tensor:
    """A replicated parameter. Each rank has only part of its uses, so its gradient is summed over the axis."""
    return parameter if axis.size == 1 else _Moved.apply(parameter, *COPY, axis)


def sum_parts(x: Tensor, axis: Axis) -> Tensor:
    """The sum of the ranks' parts, which all then use alike."""
    return x if axis.size == 1 else _Moved.apply(x, *REDUCE, axis)


def sum_over(x: Tensor, axis: Axis) -> Tensor:
    """The sum over the axis of a value that every rank then uses. The gradient is summed too."""
    return x if axis.size == 1 else _Moved.apply(x, _sum, _sum, axis)


def swap(axis: Axis, sent: Sequence[tuple[int, Tensor]], received: Sequence[tuple[int, Tensor]]) -> list[dist.Work]:
    """Start to send tensors to ranks of the axis, and to receive tensors from them.

    The numbers are their places less this rank's, modulo the size of the axis.

    Sends and receives are complete after their `wait`. All ranks must call it in the same order."""

    def peer(by: int) -> int:
        return axis.ranks[(axis.rank + by) % axis.size]

    calls = [
        *(dist.P2POp(dist.isend, each, peer(by), group=axis.group) for by, each in sent),
        *(dist.P2POp(dist.irecv, each, peer(by), group=axis.group) for by, each in received),
    ]
    return dist.batch_isend_irecv(calls) if calls else []
