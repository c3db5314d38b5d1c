"""Normalisation of the residual stream and of queries and keys. Statistics are fp32 for every type of the stream."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from megatron.config.sections.model import NormOptions
from megatron.parallel.layers.collectives import all_reduce, sum_gradient, sum_over
from megatron.parallel.layers.over_tokens import over_tokens
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.initial import ONES, ZEROS
from megatron.parallel.layout.mesh import ALONE
from megatron.parallel.layout.precision import at_least_fp32, wide_type
from megatron.parallel.layout.shard import Role, Shard
from megatron.parallel.messages.account import here, saved_of

BY_ROWS = True  # RMSNorm on CPUs. False while tensors of a CPU stand for tensors of a GPU, which has a kernel
ROWS = 1 << 16  # elements that RMSNorm computes with at once on a CPU: 256 KiB in fp32


def norm_parameters(options: NormOptions, size: int) -> int:
    """Trainable elements of a `Norm`."""
    return {"layernorm": 2 if options.bias else 1, "rmsnorm": 1, "nonparametric": 0}[options.type] * size


def norm_activations(options: NormOptions, size: int) -> int:
    """Elements that a `Norm` keeps of one vector: the vector, its mean (except RMSNorm) and its scale."""
    return size + (1 if options.type == "rmsnorm" else 2)


class Norm(nn.Module):
    """LayerNorm, RMSNorm, or LayerNorm without parameters, over the last dimension.

    The result has the type of the layers, also where the stream is fp32.

    Args:
        partial: each rank has only part of the weight's uses (a slice of the sequence, some of the heads). The gradient
            of the replicated weight is then summed over the tensor parallel ranks.
        stream: of the residual stream, whose channels columns of ranks share. Else each has all of `size`.
        weighted: whether it has parameters, if its type has some.

    Attributes:
        grouped: sum gradients of weight and bias over groups of tokens (`over_tokens`).
    """

    grouped = False

    def __init__(
        self,
        make: ParameterFactory,
        size: int,
        options: NormOptions,
        *,
        partial: bool,
        stream: bool = True,
        weighted: bool = True,
    ):
        super().__init__()
        self.columns, along = make.mesh.columns if stream else ALONE, 0 if stream else None
        self.rms, self.epsilon, self.size, self.dtype = options.type == "rmsnorm", options.epsilon, size, make.dtype
        self.axis, self.unit_offset = make.mesh.tensor if partial else None, options.unit_offset
        self.weight = self.bias = None
        if weighted and options.type != "nonparametric":
            start = ZEROS if options.unit_offset else ONES
            self.weight = make.parameter("weight", (size,), role=Role.NORM, init=start, stream=along)
        if weighted and options.type == "layernorm" and options.bias:
            self.bias = make.parameter("bias", (size,), role=Role.NORM, init=ZEROS, stream=along)

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor | None = self.weight
        bias: Tensor | None = self.bias
        if self.axis is not None:
            weight = None if weight is None else sum_gradient(weight, self.axis)
            bias = None if bias is None else sum_gradient(bias, self.axis)
        if self.unit_offset and weight is not None:  # not rounded to 16 bits, which has fewer values near 1 than near 0
            weight = 1.0 + at_least_fp32(weight)
        if self.columns.size > 1:
            return _OverColumns.apply(x, weight, bias, self)
        if self.grouped and weight is not None and bias is not None and not self.rms:
            weight, bias = over_tokens([weight, bias], x)
            if weight.dim() == x.dim():
                normed = F.layer_norm(at_least_fp32(x), (self.size,), eps=self.epsilon)
                return (normed * weight + bias).to(self.dtype)
        wide = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
        x, (weight, bias) = x.to(wide), (None if each is None else each.to(wide) for each in (weight, bias))
        if self.rms:
            return rms_norm(x, weight, self.epsilon).to(self.dtype)
        return F.layer_norm(x, (self.size,), weight, bias, self.epsilon).to(self.dtype)


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """`F.rms_norm` over the last dimension, with its bits. Torch has no kernel for CPUs. It runs about 20 operations
    for the norm and its gradient, each on the whole tensor in fp32, and keeps two of their results."""
    trains = torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad))
    # In fp32 autograd adds the two summands of the input's gradient to that of a residual one by one.
    narrow = x.dtype.itemsize == 2 and x.device.type == "cpu"
    if trains and BY_ROWS and narrow and not torch.compiler.is_compiling():
        return _RowsOfRMSNorm.apply(x, weight, epsilon)
    return F.rms_norm(x, x.shape[-1:], weight, epsilon)


def _some_rows(x_NH: Tensor) -> Iterator[slice]:
    rows = max(1, ROWS // x_NH.shape[-1])
    end = rows if is_fake(x_NH) else len(x_NH)  # without values, some rows stand for all
    return (slice(begin, begin + rows) for begin in range(0, end, rows))


class _RowsOfRMSNorm(torch.autograd.Function):
    """RMSNorm and its gradient, some rows at a time, which the cache of a core holds in fp32. Keeps the input and a
    number per row. It runs the operations of torch and autograd in their order, which gives the same bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
        x_NH, wide = x.reshape(-1, x.shape[-1]), wide_type(x.dtype)
        y_NH, scale_N1 = torch.empty_like(x_NH), x_NH.new_empty(len(x_NH), 1, dtype=wide)
        weight_H = None if weight is None else weight.to(wide)
        for some in _some_rows(x_NH):
            rows = x_NH[some].to(wide)
            normed = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True).add_(epsilon), out=scale_N1[some])
            y_NH[some] = normed if weight_H is None else normed.mul_(weight_H)
        ctx.save_for_backward(x, weight, scale_N1)
        return y_NH.view(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_y: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, scale_N1 = ctx.saved_tensors
        x_NH, of_y_NH, wide = (*(each.reshape(-1, x.shape[-1]) for each in (x, of_y)), scale_N1.dtype)
        of_x_NH, weight_H = torch.empty_like(x_NH), None if weight is None else weight.to(wide)
        uses_NH = torch.empty(x_NH.shape, dtype=wide) if ctx.needs_input_grad[1] else None
        for some in _some_rows(x_NH):
            rows, scale, of_normed = x_NH[some].to(wide), scale_N1[some], of_y_NH[some].to(wide)
            if uses_NH is not None:
                torch.mul(of_normed, rows * scale, out=uses_NH[some])
            of_normed = of_normed if weight_H is None else of_normed * weight_H
            of_scale = (of_normed * rows).sum(-1, keepdim=True)
            of_mean = -0.5 * of_scale * scale.pow(3) / x.shape[-1]
            of_x_NH[some] = (of_normed * scale).add_((rows * 2.0).mul_(of_mean))
        of_weight = None
        if uses_NH is not None:
            uses = uses_NH.view(x.shape)
            if not of_y.is_contiguous():  # torch sums in the order of the gradient's memory
                uses = torch.empty_like(of_y, dtype=wide).copy_(uses)
            of_weight = uses.sum_to_size(x.shape[-1]).to(weight.dtype)
        return of_x_NH.view(x.shape), of_weight, None


class _OverColumns(torch.autograd.Function):
    """`Norm` with the statistics of all channels: one sum over the columns, and two where the mean is subtracted. It
    keeps what torch's kernels keep: the input in its own type, and a number or two per vector."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: Norm) -> Tensor:
        y, mean, ctx.norm, ctx.layer = at_least_fp32(x), None, norm, here()
        if not norm.rms:
            mean = all_reduce(y.sum(-1, keepdim=True), norm.columns) / norm.size
            y = y - mean
        squares = all_reduce(y.square().sum(-1, keepdim=True), norm.columns)
        scale = torch.rsqrt(squares / norm.size + norm.epsilon)
        ctx.save_for_backward(x, mean, scale, weight, bias)
        y = y * scale if weight is None else y * scale * weight
        return (y if bias is None else y + bias).to(norm.dtype)

    @staticmethod
    def backward(ctx: Any, of_y: Tensor) -> tuple[Tensor | None, ...]:
        (x, mean, scale, weight, bias), norm, ones = saved_of(ctx), ctx.norm, tuple(range(of_y.ndim - 1))
        of_y, normed = of_y.to(scale.dtype), (x if mean is None else x - mean) * scale
        of_weight = None if weight is None else (of_y * normed).sum(ones).to(weight.dtype)
        of_bias = None if bias is None else of_y.sum(ones).to(bias.dtype)
        of_x = of_y if weight is None else of_y * weight
        along = all_reduce((of_x * normed).sum(-1, keepdim=True), norm.columns) / norm.size
        if mean is not None:
            of_x = of_x - all_reduce(of_x.sum(-1, keepdim=True), norm.columns) / norm.size
        return ((of_x - normed * along) * scale).to(x.dtype), of_weight, of_bias, None


class WideRMSNorm(nn.Module):
    """RMSNorm over the width of all heads together (OLMo-2). Each rank holds some of them.

    Args:
        width: channels of all heads.
        unit: channels per head, which are never cut.
        sharded: False where every rank holds all heads and uses some of them.
    """

    def __init__(self, make: ParameterFactory, width: int, unit: int, options: NormOptions, *, sharded: bool):
        super().__init__()
        self.width, self.epsilon, self.sharded, self.axis = width, options.epsilon, sharded, make.mesh.tensor
        shard, self.unit_offset = Shard(0, None, unit) if sharded else None, options.unit_offset
        start = ZEROS if options.unit_offset else ONES
        self.weight = make.parameter("weight", (width,), role=Role.NORM, init=start, shard=shard)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, this rank's channels] to the same."""
        weight = self.weight if self.sharded else sum_gradient(self.weight, self.axis)
        if self.unit_offset:
            weight = 1.0 + weight
        if not self.sharded or self.axis.size == 1:
            return rms_norm(x, weight, self.epsilon)
        x32 = at_least_fp32(x)
        squares = sum_over(x32.square().sum(-1, keepdim=True), self.axis)
        return (x32 * torch.rsqrt(squares / self.width + self.epsilon)).to(x.dtype) * weight
