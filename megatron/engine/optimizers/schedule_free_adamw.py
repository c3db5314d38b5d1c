"""Schedule-free AdamW (Defazio et al. 2024, arXiv 2405.15682): an average of the iterates instead of a schedule."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from megatron.config import Config

from .base import ElementwiseOptimizer
from .contract import STEP
from .facts import SCHEDULE_FREE_ADAMW

Z = "z"


class ScheduleFreeAdamW(ElementwiseOptimizer):
    """A parameter has the values y = (1 - b1) z + b1 x, where gradients are taken.

    With direction d = g / (sqrt(v / (1 - b2^t)) + eps) + decay y, v an average of g^2: z -= lr d, and x = (1 - c) x + c
    z. The share c is this step's weight t^power largest^rate_power over the sum of all weights. `largest` is the
    largest scheduled rate so far.

    x is evaluated, saved as the weights and exported. It follows from y and z and is not kept.

    State: `step`, `weight_sum`, `largest_rate`, `z`, `exp_avg_sq`.

    Raises:
        ValueError: b1 is 0, so that x does not follow from y and z.
    """

    numbers = ("weight_sum", "largest_rate")

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        power: float = 0.0,
        rate_power: float = 2.0,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**settings, "power": power, "rate_power": rate_power})
        if any(group["betas"][0] == 0 for group in self.param_groups):
            raise ValueError("optimizer.betas: the first must be above 0 for schedule_free_adamw")

    @classmethod
    def build(cls, config: Config, groups: list[dict[str, Any]]) -> "ScheduleFreeAdamW":
        common, own = config.optimizer, SCHEDULE_FREE_ADAMW.options_of(config)
        return cls(groups, lr=0.0, betas=common.betas, eps=common.epsilon, **own)

    def state_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return (Z, "exp_avg_sq", STEP, *self.numbers)

    def evaluation_weights(self, group: Mapping[str, Any], weights: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """x, from y and z."""
        if int(state[STEP]) == 0:
            return weights.detach().clone()
        return weights.detach().lerp(state[Z], 1 - 1 / group["betas"][0])

    def update(self, group: Mapping[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        state, (beta1, beta2), lr = self.state[parameter], group["betas"], group["lr"]
        if int(state[STEP]) == 0:
            state[Z].copy_(parameter)
        state[STEP] += 1
        step = int(state[STEP])
        share = self._share(group, state, step)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        direction = gradient / (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        direction.add_(parameter, alpha=group["weight_decay"])
        parameter.lerp_(state[Z], share).add_(direction, alpha=lr * (beta1 * (1 - share) - 1))
        state[Z].add_(direction, alpha=-lr)

    def _share(self, group: Mapping[str, Any], state: dict[str, Tensor], step: int) -> float:
        """c, the same for all groups: their multiples of the scheduled rate do not change it."""
        rate = group.get("scheduled_lr", group["lr"])
        largest = max(float(state["largest_rate"]), rate)
        weight = float(step) ** group["power"] * largest ** group["rate_power"]
        total = float(state["weight_sum"]) + weight
        state["largest_rate"].fill_(largest)
        state["weight_sum"].fill_(total)
        return weight / total if total else 0.0
