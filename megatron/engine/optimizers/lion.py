"""Lion (Chen et al. 2023, arXiv 2302.06675): the sign of an interpolated momentum, and decoupled weight decay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from megatron.config import Config

from .base import EagerOptimizer


class Lion(EagerOptimizer):
    """With gradient g and momentum m: p -= lr * (sign(b1 m + (1 - b1) g) + decay p); m = b2 m + (1 - b2) g.

    One state tensor per parameter, `exp_avg`, of its shape and type. Usual rates are 3 to 10 times smaller than
    AdamW's, with a weight decay larger by as much.

    Raises:
        ValueError: a coefficient is outside [0, 1), or a rate or decay is negative.
    """

    def __init__(
        self, params: ParamsT, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ):
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"optimizer.betas: lion needs both in [0, 1), not {tuple(betas)}")
        if lr < 0 or weight_decay < 0:
            raise ValueError(f"optimizer.lr ({lr}) and optimizer.weight_decay ({weight_decay}) must not be negative")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @classmethod
    def build(cls, config: Config, groups: list[dict[str, Any]]) -> Lion:
        return cls(groups, lr=0.0, betas=config.optimizer.betas)

    def state_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg",)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad.to(parameter.dtype)
                state = self.state[parameter]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                direction = state["exp_avg"].mul(beta1).add_(gradient, alpha=1 - beta1).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(direction, alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(gradient, alpha=1 - beta2)
        return loss
