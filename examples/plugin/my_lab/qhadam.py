"""QHAdam (Ma and Yarats 2019, arXiv 1810.06801): AdamW whose two means are mixed with the gradient of the moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from megatron.config import Config
from megatron.config.problems import UserError


class QHAdam(torch.optim.Optimizer):
    """With gradient g at update t (from 1):

        m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2
        M = (1 - nu1) g + nu1 m / (1 - b1^t),  V = (1 - nu2) g^2 + nu2 v / (1 - b2^t)
        p -= lr (M / (sqrt(V) + epsilon) + decay p)

    b1, b2, epsilon and decay are keys of the section `optimizer`. Its `options` may have `nu1` and `nu2`, from 0 to 1.
    With both 1 it is AdamW.
    """

    def __init__(self, params: ParamsT, betas: tuple[float, float], epsilon: float, nu1: float, nu2: float):
        wrong = [f"{name} must be from 0 to 1" for name, nu in (("nu1", nu1), ("nu2", nu2)) if not 0 <= nu <= 1]
        if not all(0 <= beta < 1 for beta in betas):
            wrong.append("optimizer.betas must be at least 0 and below 1")
        if wrong:
            raise UserError(f"options of QHAdam: {'; '.join(wrong)}")
        own = {"betas": betas, "epsilon": epsilon, "nu1": nu1, "nu2": nu2}
        super().__init__(params, {"lr": 0.0, "weight_decay": 0.0, **own})

    @classmethod
    def build(cls, config: Config, groups: list[dict[str, Any]]) -> QHAdam:
        section = config.optimizer
        options = {"nu1": 0.7, "nu2": 1.0}
        if unknown := section.options.keys() - options.keys():
            raise UserError(
                f"optimizer.options must not have {', '.join(sorted(map(str, unknown)))}: use {', '.join(options)}"
            )
        options |= section.options
        for name, value in options.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UserError(f"optimizer.options.{name} must be a number, not {value!r}")
        return cls(groups, section.betas, section.epsilon, options["nu1"], options["nu2"])

    def state_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("step", "mean", "mean_square")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad.to(parameter.dtype), group)
        return loss

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:  # the engine makes the states before the first step, and plain torch does not
            state["step"] = torch.zeros((), dtype=torch.float32)
            state |= {name: torch.zeros_like(parameter) for name in self.state_names(group) if name != "step"}
        state["step"] += 1
        t, (b1, b2), nu1, nu2 = int(state["step"]), group["betas"], group["nu1"], group["nu2"]
        state["mean"].lerp_(gradient, 1 - b1)
        state["mean_square"].mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        mean = state["mean"] * (nu1 / (1 - b1**t)) + (1 - nu1) * gradient
        square = state["mean_square"] * (nu2 / (1 - b2**t)) + (1 - nu2) * gradient.square()
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(mean, square.sqrt_().add_(group["epsilon"]), value=-group["lr"])
