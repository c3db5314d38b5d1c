"""Products whose weights' gradients are computed later, in a pass of their own (zero-bubble pipeline schedules)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from ..layout.precision import plain

Waiting = list[tuple[Tensor, Tensor, Tensor]]  # weight [N, K], input [..., K], gradient of the output [..., N]


class LaterGradients:
    """Products of a rank's layers, and the factors of gradients that wait.

    Autograd does not know the weight: a hook on a gradient that is not there yet would run otherwise.
    """

    def __init__(self) -> None:
        self.waiting: Waiting = []

    def use_in(self, module: nn.Module) -> None:
        """All linear layers inside compute by this object. A product in 8 bits stays whole."""
        for each in module.modules():
            if getattr(each, "linear", None) is plain:
                each.linear = self.linear  # type: ignore[assignment]

    def linear(self, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        """As `F.linear`. Weights that are no parameters, and inputs without a gradient, are left to autograd."""
        waits = torch.is_grad_enabled() and x.requires_grad and weight_NK.requires_grad and weight_NK.is_leaf
        if not waits:
            return plain(x, weight_NK, bias_N)
        product: Tensor = _Product.apply(x, bias_N, (weight_NK, self.waiting))
        return product

    def take(self) -> Waiting:
        """The factors of the backward pass that has just ended."""
        found, self.waiting[:] = self.waiting[:], []
        return found


def accumulate(waiting: Waiting) -> None:
    """Add the gradients to their weights, as a backward pass would, with its hooks: once per weight."""
    left = Counter(weight for weight, _, _ in waiting)
    sums: dict[Tensor, Tensor] = {}
    while waiting:
        weight, x, gradient = waiting.pop(0)
        own = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
        sums[weight] = sums[weight] + own if weight in sums else own
        left[weight] -= 1
        if not left[weight]:
            weight.backward(sums.pop(weight))


class _Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, held: tuple[Tensor, Waiting]) -> Tensor:
        weight, ctx.waiting = held
        ctx.weight, ctx.biased = weight, bias is not None
        ctx.save_for_backward(x)
        return plain(x, weight.detach(), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (gradient,), (x,) = gradients, ctx.saved_tensors
        ctx.waiting.append((ctx.weight, x, gradient))
        return gradient @ ctx.weight.detach(), gradient.flatten(0, -2).sum(0) if ctx.biased else None, None
