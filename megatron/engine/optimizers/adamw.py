"""AdamW (Loshchilov & Hutter 2019), torch's own."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.config import Config

from .base import EagerAdamW, decay_cautiously
from .contract import initialize_state
from .facts import ADAMW
from .groups import use_fused


class AdamW(EagerAdamW):
    """State: `step`, `exp_avg`, `exp_avg_sq`.

    Attributes:
        narrow: for each parameter, the weights that it is copied to, if `kernels` write them in the same pass.
        kernels: the module `adamw_kernels`, on a GPU where one group has one flat parameter.
    """

    cautious = False
    kernels: Any = None
    narrow: Mapping[Tensor, Tensor]

    @classmethod
    def build(cls, config: Config, groups: list[dict[str, Any]]) -> "AdamW":
        options, cautious = config.optimizer, ADAMW.options_of(config)["cautious"]
        # None, unlike False, lets torch choose its next best implementation. Fused kernels drop a step on their own,
        # and the decay that is done here would stay.
        fused = None if cautious else use_fused(config, groups) or None
        made = cls(groups, lr=0.0, betas=options.betas, eps=options.epsilon, fused=fused)
        made.cautious = cautious
        return made

    def state_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "step")

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.kernels is not None:
            return self._in_one_pass()
        if not self.cautious:
            return super().step(closure)
        decays = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    average = state["exp_avg"] if "exp_avg" in state else torch.zeros_like(parameter)
                    step = average.lerp(parameter.grad.to(average.dtype), 1 - group["betas"][0])
                    decay_cautiously(parameter, step, group["lr"] * group["weight_decay"])
            group["weight_decay"] = 0.0
        try:
            return super().step(closure)
        finally:
            for group, decay in zip(self.param_groups, decays):
                group["weight_decay"] = decay

    def _in_one_pass(self) -> None:
        """`found_inf` prevents the update, and `grad_scale` divides gradients, as in torch's fused kernels."""
        due = [(group, each) for group in self.param_groups for each in group["params"] if each.grad is not None]
        for group, parameter in due:
            initialize_state(self, group, [parameter])
        one = torch.ones((), device=due[0][1].device)
        bad, scale = (getattr(self, name, None) for name in ("found_inf", "grad_scale"))
        bad, scale = one - one if bad is None else bad, one if scale is None else scale
        # a list, since the host would read one tensor for all
        torch._foreach_add_([self.state[parameter]["step"] for _, parameter in due], [one - bad] * len(due))
        for group, parameter in due:
            self.kernels.update(group, parameter, self.narrow[parameter], self.state[parameter], bad, scale)
