"""AdEMAMix (Pagliardini et al. 2024, arXiv 2409.03137): AdamW with a second, much slower mean of the gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from megatron.config import Config
from megatron.config.problems import UserError


class AdEMAMix(torch.optim.Optimizer):
    """With gradient g at update t (from 1), T the length of the warmup:

        m = b1 m + (1 - b1) g,  s = b3(t) s + (1 - b3(t)) g,  v = b2 v + (1 - b2) g^2
        p -= lr ((m / (1 - b1^t) + alpha(t) s) / (sqrt(v / (1 - b2^t)) + epsilon) + decay p)
        alpha(t) = alpha min(t / T, 1)
        b3(t) = min(b3, exp(ln(b1) ln(b3) / ((1 - t/T) ln(b3) + t/T ln(b1))))

    b1, b2, epsilon and decay are those of the section `optimizer`. Its `options` may have `slow_beta` (b3), `alpha` and
    `warmup_steps` (T; the steps of the run if it is not given, 0 for none).
    """

    def __init__(self, params, betas: tuple[float, float], epsilon: float, slow_beta: float, alpha: float, warmup: int):
        wrong = [
            *(["slow_beta must be above 0 and below 1"] if not 0 < slow_beta < 1 else []),
            *(["alpha must not be negative"] if alpha < 0 else []),
            *(["warmup_steps must not be negative"] if warmup < 0 else []),
            *(["optimizer.betas must be above 0 and below 1"] if not all(0 < beta < 1 for beta in betas) else []),
        ]
        if wrong:
            raise UserError(f"options of AdEMAMix: {'; '.join(wrong)}")
        own = {"betas": betas, "epsilon": epsilon, "slow_beta": slow_beta, "alpha": alpha, "warmup": warmup}
        super().__init__(params, {"lr": 0.0, "weight_decay": 0.0, **own})

    @classmethod
    def build(cls, config: Config, groups: list[dict[str, Any]]) -> AdEMAMix:
        section = config.optimizer
        options = {"slow_beta": 0.9999, "alpha": 5.0, "warmup_steps": config.training.steps}
        if unknown := section.options.keys() - options.keys():
            raise UserError(
                f"optimizer.options must not have {', '.join(sorted(map(str, unknown)))}: use {', '.join(options)}"
            )
        options |= section.options
        for name, value in options.items():
            whole = name == "warmup_steps"
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                raise UserError(f"optimizer.options.{name} must be a {'whole ' * whole}number, not {value!r}")
        return cls(
            groups, section.betas, section.epsilon, options["slow_beta"], options["alpha"], options["warmup_steps"]
        )

    def state_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("step", "mean", "slow_mean", "mean_square")

    @torch.no_grad()
    def step(self, closure=None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad.to(parameter.dtype), self.state[parameter]
        if not state:  # the engine makes the states before the first step; plain torch does not
            state["step"] = torch.zeros((), dtype=torch.float32)
            state |= {name: torch.zeros_like(parameter) for name in self.state_names(group) if name != "step"}
        state["step"] += 1
        t, (b1, b2) = int(state["step"]), group["betas"]
        b3, alpha = slow_beta(t, group), group["alpha"] * _share(t, group["warmup"])
        state["mean"].lerp_(gradient, 1 - b1)
        state["slow_mean"].lerp_(gradient, 1 - b3)
        state["mean_square"].mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        direction = state["mean"] / (1 - b1**t) + alpha * state["slow_mean"]
        direction /= (state["mean_square"] / (1 - b2**t)).sqrt_().add_(group["epsilon"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(direction, alpha=-group["lr"])


def slow_beta(t: int, group: Mapping[str, Any]) -> float:
    """b3(t): in the warmup the half-life of the slow mean grows about linearly, from that of the fast mean."""
    share, low, high = _share(t, group["warmup"]), math.log(group["betas"][0]), math.log(group["slow_beta"])
    return min(group["slow_beta"], math.exp(low * high / ((1 - share) * high + share * low)))


def _share(t: int, warmup: int) -> float:
    return min(t / warmup, 1.0) if warmup else 1.0
