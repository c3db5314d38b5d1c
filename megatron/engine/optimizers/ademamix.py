"""AdEMAMix (Pagliardini et al. 2024, arXiv 2409.03137): AdamW with a second, slow average of the gradients."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from megatron.config import Config

from .base import ElementwiseOptimizer
from .facts import ADEMAMIX


class AdEMAMix(ElementwiseOptimizer):
    """p -= lr ((m1 / (1 - b1^t) + alpha_t m2) / (sqrt(v / (1 - b2^t)) + eps) + decay p), with averages m1, m2 and v by
    b1, b3_t and b2. Over `warmup` steps, alpha grows linearly, and b3 so that the slow average's half-life does.

    State: `step`, `exp_avg`, `exp_avg_slow`, `exp_avg_sq`."""

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        slow: float = 0.9999,
        alpha: float = 5.0,
        warmup: int = 0,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "slow": slow, "alpha": alpha, "warmup": warmup, "eps": eps}
        super().__init__(params, {**settings, "weight_decay": weight_decay})

    @classmethod
    def build(cls, config: Config, groups: list[dict[str, Any]]) -> "AdEMAMix":
        common, own = config.optimizer, ADEMAMIX.options_of(config)
        warmup = config.training.steps if own["warmup"] is None else own["warmup"]
        return cls(
            groups, lr=0.0, betas=common.betas, slow=own["slow"], alpha=own["alpha"], warmup=warmup, eps=common.epsilon
        )

    def state_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_slow", "exp_avg_sq", "step")

    def update(self, group: Mapping[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        state["step"] += 1
        step = int(state["step"])
        alpha, beta3 = slow_settings(step, group["warmup"], group["alpha"], beta1, group["slow"])
        fast = state["exp_avg"].lerp_(gradient, 1 - beta1)
        slow = state["exp_avg_slow"].lerp_(gradient, 1 - beta3)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        size = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(fast / (1 - beta1**step) + alpha * slow, size, value=-group["lr"])


def slow_settings(step: int, warmup: int, alpha: float, beta1: float, slow: float) -> tuple[float, float]:
    """alpha and the slow average's coefficient at a step."""
    if step >= warmup or beta1 == 0:
        return (alpha, slow) if step >= warmup else (alpha * step / warmup, slow)
    share, begin, end = step / warmup, math.log(beta1), math.log(slow) if slow else -math.inf
    if end <= begin:
        return alpha * share, slow
    return alpha * share, min(math.exp(begin * end / ((1 - share) * end + share * begin)), slow)
