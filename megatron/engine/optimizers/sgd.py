"""Stochastic gradient descent with decoupled weight decay (Loshchilov & Hutter 2019).

torch's SGD adds the decay to the gradient, where momentum accumulates it."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron.config import Config

from .base import ElementwiseOptimizer


class SGD(ElementwiseOptimizer):
    """With gradient g: m = momentum m + g, then p -= lr * (m, or g + momentum m with Nesterov, + decay p).

    State: `momentum_buffer`, unless momentum is 0.

    Raises:
        ValueError: momentum is outside [0, 1), or a rate or decay is negative, or Nesterov has no momentum.
    """

    def __init__(
        self, params: ParamsT, lr: float = 1e-2, momentum: float = 0, nesterov: bool = False, weight_decay: float = 0.0
    ) -> None:
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"optimizer.momentum: {momentum} is outside [0, 1)")
        if lr < 0 or weight_decay < 0:
            raise ValueError(f"optimizer.lr ({lr}) and optimizer.weight_decay ({weight_decay}) must not be negative")
        if nesterov and momentum == 0:
            raise ValueError("optimizer.nesterov: Nesterov needs optimizer.momentum above 0")
        super().__init__(params, {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay})

    @classmethod
    def build(cls, config: Config, groups: list[dict[str, Any]]) -> "SGD":
        return cls(groups, lr=0.0, momentum=config.optimizer.momentum, nesterov=config.optimizer.nesterov)

    def state_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def update(self, group: Mapping[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        direction = gradient
        if group["momentum"]:
            average = self.state[parameter]["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
            direction = gradient.add(average, alpha=group["momentum"]) if group["nesterov"] else average
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(direction, alpha=-group["lr"])
