"""Normalisation of the residual stream and of queries and keys. Statistics are fp32 for every type of the stream."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.sections.model import NormOptions
from megatron.parallel.layers.collectives import all_reduce, sum_gradient, sum_over
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.initial import ONES, ZEROS
from megatron.parallel.layout.mesh import ALONE
from megatron.parallel.layout.precision import at_least_fp32
from megatron.parallel.layout.shard import Role, Shard
from megatron.parallel.messages.account import here, saved_of


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
    """

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
        wide = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
        x, (weight, bias) = x.to(wide), (None if each is None else each.to(wide) for each in (weight, bias))
        if self.rms:
            return F.rms_norm(x, (self.size,), weight, self.epsilon).to(self.dtype)
        return F.layer_norm(x, (self.size,), weight, bias, self.epsilon).to(self.dtype)


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
            return F.rms_norm(x, (self.width,), weight, self.epsilon)
        x32 = at_least_fp32(x)
        squares = sum_over(x32.square().sum(-1, keepdim=True), self.axis)
        return (x32 * torch.rsqrt(squares / self.width + self.epsilon)).to(x.dtype) * weight
