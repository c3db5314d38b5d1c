"""Products with matrices that a rank gathers for each of them: the depth of tensor parallelism in three dimensions.

Neighbours among the replicas store one run each of a matrix's rows, and gather the whole before a product. The
backward pass gathers again, and sums the gradient over these ranks, in fp32 at least, so that each gets its own run
(Singh et al. 2023, arXiv:2305.13525, where ranks and samples form a grid and this is its third side). The ranks have
other tokens, and no activation travels. The optimizer's states and the sums over further replicas are as for experts.
Experts are gathered in the same way, unless tokens travel to them.

With n ranks, each sends (n - 1) / n of a matrix's N M numbers per pass: twice in the compute type, once in fp32. Where
the backend can, the gather of the forward pass travels under the product before its own (`ahead.py`), and the two
messages of the backward pass under its two products. The matrix is gathered while its gradient is multiplied. That
gradient is summed while the input's is multiplied.

Shapes: T tokens of this rank, n ranks, N outputs, M inputs, R = N / n rows of a run."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..layout.mesh import Axis
from ..layout.precision import at_least_fp32
from ..messages.account import here, saved_of
from .ahead import begin_whole, whole_for_product
from .later import Linear, Rule


def _begin_sum(of_whole_NM: Tensor, axis: Axis, dtype: torch.dtype) -> Callable[[], Tensor]:
    """This rank's run of the sum of the ranks' gradients, summed in fp32, from a function that waits for it."""
    of_whole_NM = at_least_fp32(of_whole_NM).contiguous()
    of_own = of_whole_NM.new_empty((of_whole_NM.shape[0] // axis.size, *of_whole_NM.shape[1:]))
    summing = dist.reduce_scatter_tensor(of_own, of_whole_NM, group=axis.group, async_op=True)

    def end() -> Tensor:
        summing.wait()
        return of_own.to(dtype)

    return end


class _Product(torch.autograd.Function):
    """A rule's product of x and W. Saves this rank's run of W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, own_RM: Tensor, axis: Axis, rule: Rule) -> Tensor:
        ctx.save_for_backward(x, own_RM)
        ctx.axis, ctx.rule, ctx.layer = axis, rule, here()
        return rule.product(x, whole_for_product(own_RM, axis))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x, own_RM), (grad,) = saved_of(ctx), gradients
        of_x, sum_of_own = None, None
        begun = begin_whole(own_RM, ctx.axis) if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[1]:
            sum_of_own = _begin_sum(ctx.rule.of_weight(grad, x), ctx.axis, own_RM.dtype)
        if begun is not None:
            whole_NM, gathering = begun
            gathering.wait()
            of_x = ctx.rule.of_input(grad, whole_NM)
        return of_x, None if sum_of_own is None else sum_of_own(), None, None


class _Gathered(torch.autograd.Function):
    """The rows of all ranks."""

    @staticmethod
    def forward(ctx: Any, own_RM: Tensor, axis: Axis) -> Tensor:
        ctx.axis, ctx.dtype, ctx.layer = axis, own_RM.dtype, here()
        whole, gathering = begin_whole(own_RM, axis)
        gathering.wait()
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _begin_sum(gradients[0], ctx.axis, ctx.dtype)(), None


def gathered(own_RM: Tensor, axis: Axis) -> Tensor:
    """The rows of all ranks, which each uses for its own tokens."""
    return own_RM if axis.size == 1 else _Gathered.apply(own_RM, axis)


def gathered_product(x: Tensor, own_RM: Tensor, axis: Axis, rule: Rule) -> Tensor:
    """A rule's product with a weight whose first dimension the ranks of the axis store in equal runs. All ranks call it
    together. The gradient of `own_RM`, this rank's run, is the sum over the tokens of all ranks."""
    y: Tensor = _Product.apply(x, own_RM, axis, rule)
    return y


def linear_of_gathered(x: Tensor, own_RM: Tensor, bias_N: Tensor | None, axis: Axis) -> Tensor:
    """[..., M] to [..., N] with a matrix whose rows the ranks of the axis store in equal runs. All ranks call it
    together.

    Args:
        x: of this rank's own tokens.
        own_RM: this rank's run. Its gradient is the sum over the tokens of all ranks.
        bias_N: whole on every rank. Its gradient is only of this rank's tokens.
    """
    y = gathered_product(x, own_RM, axis, Linear)
    return y if bias_N is None else y + bias_N
