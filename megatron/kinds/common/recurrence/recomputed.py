"""A function whose intermediate tensors are made again for the backward pass."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.parallel.messages.account import here, saved_of

T = TypeVar("T")


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable, *inputs: Any) -> Any:
        ctx.layer = here()
        ctx.function, ctx.needed = function, [isinstance(each, Tensor) and each.requires_grad for each in inputs]
        ctx.save_for_backward(*inputs)
        with torch.no_grad():
            return call(function, *inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return None, *call(_gradients, ctx.function, ctx.needed, saved_of(ctx), gradients)


def _gradients(
    function: Callable, needed: list[bool], saved: tuple[Any, ...], gradients: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    # Others are the same objects, by which kernels know their plans.
    inputs = [each.detach().requires_grad_() if need else each for each, need in zip(saved, needed)]
    with torch.enable_grad():
        outputs = function(*inputs)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    pairs: list[tuple[Tensor, Tensor]] = [
        (out, gradient)
        for out, gradient in zip(outputs, gradients)
        if isinstance(out, Tensor) and out.requires_grad and gradient is not None
    ]
    wanted = [each for each, need in zip(inputs, needed) if need and each is not None]
    found = iter(torch.autograd.grad([out for out, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
    return tuple(next(found) if need else None for need in needed)


def call(function: Callable[..., T], *inputs: Any) -> T:
    """`function(*inputs)`, of a pure function. A rehearsal replaces it, and runs only the first of equal calls."""
    return function(*inputs)


def recomputed(function: Callable[..., T], *inputs: Tensor | None) -> T:
    """`function(*inputs)`, which keeps only the inputs for its gradient. A compiler chooses what its graph keeps.

    Args:
        function: pure, of tensors (or None) to a tensor or a tuple of tensors. Its closure gets no gradient.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return function(*inputs)
    if not any(isinstance(each, Tensor) and each.requires_grad for each in inputs):
        return function(*inputs)
    return _Recomputed.apply(function, *inputs)


def recomputed_in_graph(function: Callable[..., T], *inputs: Tensor | None, **options: Any) -> T:
    """`function(*inputs, **options)`. The backward pass of a compiled block computes its results again too, which a
    compiler would keep where an operation reads them."""
    if not torch.compiler.is_compiling():
        return function(*inputs, **options)
    run: Callable[..., T] = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    return run(function, *inputs, **options)
