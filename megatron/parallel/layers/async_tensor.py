"""Products of tensor parallel ranks that overlap with their messages (`parallel.async_tensor`).

With sequence parallelism the ranks gather a layer's input before its first matrices and scatter the sum of its last
products. Both are done in parts, one for each rank, so that a part travels while another is multiplied (Wang et al.
2023, ASPLOS, "Overlap communication with dependent computation via decomposition"). torch has both as operations on
symmetric memory, which every GPU of a host reads from the others. In the backward pass each is the other's gradient.
The gradient of the weights is a product of the gathered tensor, and needs no message.

These messages of a GPU go through no process group. This module reports them to the account as gathers and scatters.
On other devices the same numbers are gathered, multiplied and scattered one after another.

Shapes: B batch, S sequence, s = S / t of each of the t ranks, K inputs and N outputs of a matrix, H of the stream."""

import importlib
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..layout.mesh import Axis
from ..messages.account import here, note

KEY, OFF = "parallel.async_tensor", "use parallel.async_tensor=false"
LEAST = (2, 13)  # of torch


def check_async_tensor(axis: Axis, device: torch.device | str) -> None:
    """Check that this rank can use `parallel.async_tensor`.

    Raises:
        ValueError: its torch or GPU cannot, or the ranks of the axis are not all on this host.
    """
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():  # or tensors have no values
        return
    if torch.version.hip is not None:
        raise ValueError(f"{KEY} must have NVIDIA GPUs, whose memory torch shares: {OFF}")
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < LEAST:
        raise ValueError(f"{KEY} must have torch 2.13 or later, unlike {torch.__version__}: {OFF}")
    importlib.import_module("torch.distributed._symmetric_memory")  # defines the operations

    local, of_host = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    first = local - axis.rank
    if first < 0 or first + axis.size > of_host:
        raise ValueError(f"{KEY} must have the {axis.size} tensor parallel ranks on one host: {OFF}")
    own, seen = torch.cuda.current_device(), torch.cuda.device_count()
    others = [each for each in range(first, first + axis.size) if each != own and each < seen]
    cut_off = [each for each in others if not torch.cuda.can_device_access_peer(own, each)]
    if cut_off:
        raise ValueError(f"{KEY} must have GPUs that read each other's memory, unlike {own} and {cut_off[0]}: {OFF}")


def gathered_through(x_BsH: Tensor, matrices_NH: Sequence[Tensor], axis: Axis) -> tuple[Tensor, list[Tensor]]:
    """The whole sequence, [B, S, H], and its product with each matrix transposed, [B, S, N].

    The gradients of the ranks are summed, and each rank gets its part."""
    x_BSH, *products = _Gathered.apply(axis, x_BsH, *matrices_NH)
    return x_BSH, products


def scattered_product(x_BSK: Tensor, weight_HK: Tensor, axis: Axis) -> Tensor:
    """This rank's [B, s, H] of the sum of the ranks' products x Wᵀ."""
    y: Tensor = _Scattered.apply(axis, x_BSK, weight_HK)
    return y


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, x_BsH: Tensor, *matrices_NH: Tensor) -> tuple[Tensor, ...]:
        x_SBH, products = _gather_multiply(_turned(x_BsH), [each.t() for each in matrices_NH], axis)
        ctx.axis, ctx.layer = axis, here()
        ctx.save_for_backward(x_SBH, *matrices_NH)
        ctx.set_materialize_grads(False)
        return x_SBH.transpose(0, 1), *(_turned(each) for each in products)

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x_SBH, *matrices = ctx.saved_tensors
        turned = [None if each is None else _turned(each) for each in grads]
        used = [(each, matrix) for each, matrix in zip(turned, matrices) if each is not None]
        of_x = None
        if ctx.needs_input_grad[1]:
            joined, matrix = torch.cat([each for each, _ in used], -1), torch.cat([matrix for _, matrix in used])
            if grad_x is None:
                of_x = _multiply_scatter(joined, matrix, ctx.axis)
            else:  # the gathered input has another use: one message has both gradients
                of_x = _scatter((joined @ matrix).add_(_turned(grad_x)), ctx.axis)
            of_x = _turned(of_x)
        needs = ctx.needs_input_grad[2:]
        wanted = [each if need else None for each, need in zip(turned, needs)]
        of_matrices = [None if each is None else _of_weight(each, x_SBH) for each in wanted]
        return None, of_x, *of_matrices


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, x_BSK: Tensor, weight_HK: Tensor) -> Tensor:
        x_SBK = _turned(x_BSK)
        ctx.axis, ctx.layer = axis, here()
        ctx.save_for_backward(x_SBK, weight_HK)
        return _turned(_multiply_scatter(x_SBK, weight_HK.t(), axis))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_SBK, weight_HK = ctx.saved_tensors
        grad_SBH, (of_x_SBK,) = _gather_multiply(_turned(grads[0]), [weight_HK], ctx.axis)
        of_weight = _of_weight(grad_SBH, x_SBK) if ctx.needs_input_grad[2] else None
        return None, _turned(of_x_SBK), of_weight


def _turned(x: Tensor) -> Tensor:
    """Exchange batch and sequence, so that the parts of ranks are contiguous in memory."""
    return x.transpose(0, 1).contiguous()


def _of_weight(grad_SBN: Tensor, x_SBK: Tensor) -> Tensor:
    return grad_SBN.flatten(0, -2).t() @ x_SBK.flatten(0, -2)


def _symmetric(x: Tensor) -> bool:
    """Whether torch's operations on symmetric memory compute."""
    return x.is_cuda


def _gather_multiply(x_sBK: Tensor, matrices_KN: list[Tensor], axis: Axis) -> tuple[Tensor, list[Tensor]]:
    """[S, B, K], and its products with the matrices."""
    assert axis.group is not None
    shape = (x_sBK.shape[0] * axis.size, *x_sBK.shape[1:])
    if _symmetric(x_sBK):
        note(axis.group, "all_gather", shape, x_sBK.dtype)
        operation = torch.ops.symm_mem.fused_all_gather_matmul
        x_SBK, products = operation(x_sBK, matrices_KN, 0, axis.group.group_name, return_A=True)
        return x_SBK, products
    x_SBK = x_sBK.new_empty(shape)
    dist.all_gather_into_tensor(x_SBK, x_sBK, group=axis.group)
    return x_SBK, [x_SBK @ each for each in matrices_KN]


def _multiply_scatter(x_SBK: Tensor, matrix_KN: Tensor, axis: Axis) -> Tensor:
    """This rank's [s, B, N] of the sum of the products."""
    assert axis.group is not None
    if not _symmetric(x_SBK):
        return _scatter(x_SBK @ matrix_KN, axis)
    note(axis.group, "reduce_scatter", (*x_SBK.shape[:-1], matrix_KN.shape[1]), x_SBK.dtype)
    operation = torch.ops.symm_mem.fused_matmul_reduce_scatter
    y: Tensor = operation(x_SBK, matrix_KN, "sum", 0, axis.group.group_name)
    return y


def _scatter(x_SBN: Tensor, axis: Axis) -> Tensor:
    y_sBN = x_SBN.new_empty((x_SBN.shape[0] // axis.size, *x_SBN.shape[1:]))
    dist.reduce_scatter_tensor(y_sBN, x_SBN.contiguous(), group=axis.group)
    return y_sBN
