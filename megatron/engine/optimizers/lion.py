"""Lion (Chen et al. 2023, arXiv 2302.06675): the sign of an interpolated momentum, and decoupled weight decay."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron.config import Config

from .base import ElementwiseOptimizer


class Lion(ElementwiseOptimizer):
    """With gradient g and momentum m: p -= lr * (sign(b1 m + (1 - b1) g) + decay p), then m = b2 m + (1 - b2) g.

    State: `exp_avg`. Usual rates are 3 to 10 times smaller than AdamW's, and weight decays larger by the same factor.

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
    def build(cls, config: Config, groups: list[dict[str, Any]]) -> "Lion":
        return cls(groups, lr=0.0, betas=config.optimizer.betas)

    def state_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg",)

    def update(self, group: Mapping[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        (beta1, beta2), average = group["betas"], self.state[parameter]["exp_avg"]
        direction = average.mul(beta1).add_(gradient, alpha=1 - beta1).sign_()
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(direction, alpha=-group["lr"])
        average.mul_(beta2).add_(gradient, alpha=1 - beta2)
