"""A function whose intermediate tensors are made again for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron.parallel.account import here

T = TypeVar("T")


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable, *inputs: Any) -> Any:
        ctx.layer = here()
        ctx.function, ctx.needed = function, [isinstance(each, Tensor) and each.requires_grad for each in inputs]
        ctx.save_for_backward(*inputs)
        with torch.no_grad():
            return function(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        inputs = [
            each if each is None else each.detach().requires_grad_(needed)
            for each, needed in zip(ctx.saved_tensors, ctx.needed)
        ]
        with torch.enable_grad():
            outputs = ctx.function(*inputs)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        pairs: list[tuple[Tensor, Tensor]] = [
            (out, gradient) for out, gradient in zip(outputs, gradients) if out.requires_grad and gradient is not None
        ]
        wanted = [each for each, needed in zip(inputs, ctx.needed) if needed and each is not None]
        found = iter(torch.autograd.grad([out for out, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
        return None, *(next(found) if needed else None for needed in ctx.needed)


def recomputed(function: Callable[..., T], *inputs: Tensor | None) -> T:
    """`function(*inputs)`, keeping nothing but the inputs for its gradient.

    Args:
        function: pure, of tensors (or None) to a tensor or a tuple of tensors; what it closes over gets no gradient.
    """
    if not torch.is_grad_enabled() or not any(isinstance(each, Tensor) and each.requires_grad for each in inputs):
        return function(*inputs)
    return _Recomputed.apply(function, *inputs)
