"""Products whose weights' gradients are computed later, in a pass of their own (zero-bubble pipeline schedules)."""

from collections import Counter
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function

from ..layout.precision import plain


class Rule(Protocol):
    """A product of inputs and a weight, which is linear in both."""

    def product(self, x: Tensor, weight: Tensor, /) -> Tensor: ...
    def of_input(self, gradient: Tensor, weight: Tensor, /) -> Tensor: ...
    def of_weight(self, gradient: Tensor, x: Tensor, /) -> Tensor: ...


class Linear:
    """Inputs [..., K] times a weight [N, K]."""

    product = staticmethod(lambda x, weight: plain(x, weight, None))
    of_input = staticmethod(lambda gradient, weight: gradient @ weight)
    of_weight = staticmethod(lambda gradient, x: gradient.flatten(0, -2).t() @ x.flatten(0, -2))


Waiting = list[tuple[Tensor, Rule, Tensor, Tensor]]  # weight, input, gradient of the output


class LaterGradients:
    """Products of a rank's layers, and the factors of gradients that wait.

    Autograd does not know the weight: a hook on a gradient that is not there yet would run otherwise."""

    def __init__(self) -> None:
        self.waiting: Waiting = []

    def use_in(self, module: nn.Module) -> None:
        """All linear layers and experts inside compute by this object. A product in 8 bits stays whole."""
        for each in module.modules():
            if getattr(each, "linear", None) is plain:
                each.linear = self.linear  # type: ignore[assignment]
            if hasattr(each, "multiply"):  # by a rule
                each.multiply = self.multiply  # type: ignore[assignment]

    def linear(self, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        """As `F.linear`."""
        if not _waits(x, weight_NK):
            return plain(x, weight_NK, bias_N)
        product: Tensor = _Product.apply(x, bias_N, (weight_NK, Linear, self.waiting))
        return product

    def multiply(self, x: Tensor, weight: Tensor, rule: Rule) -> Tensor:
        """The product of a rule."""
        if not _waits(x, weight):
            return rule.product(x, weight)
        product: Tensor = _Product.apply(x, None, (weight, rule, self.waiting))
        return product

    def take(self) -> Waiting:
        """The factors of the backward pass that has just ended."""
        found, self.waiting[:] = self.waiting[:], []
        return found


def _waits(x: Tensor, weight: Tensor) -> bool:
    """Weights that are no parameters, and inputs without a gradient, are left to autograd."""
    return torch.is_grad_enabled() and x.requires_grad and weight.requires_grad and weight.is_leaf


def accumulate(waiting: Waiting) -> None:
    """Add the gradients to their weights, as a backward pass would, with its hooks: once per weight."""
    left = Counter(weight for weight, *_ in waiting)
    sums: dict[Tensor, Tensor] = {}
    while waiting:
        weight, rule, x, gradient = waiting.pop(0)
        own = rule.of_weight(gradient, x)
        sums[weight] = sums[weight] + own if weight in sums else own
        left[weight] -= 1
        if not left[weight]:
            weight.backward(sums.pop(weight))


class _Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, held: tuple[Tensor, Rule, Waiting]) -> Tensor:
        ctx.weight, ctx.rule, ctx.waiting = held
        ctx.biased = bias is not None
        ctx.save_for_backward(x)
        weight = ctx.weight.detach()
        return plain(x, weight, bias) if ctx.rule is Linear else ctx.rule.product(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (gradient,), (x,) = gradients, ctx.saved_tensors
        ctx.waiting.append((ctx.weight, ctx.rule, x, gradient))
        return (
            ctx.rule.of_input(gradient, ctx.weight.detach()),
            gradient.flatten(0, -2).sum(0) if ctx.biased else None,
            None,
        )
