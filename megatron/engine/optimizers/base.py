"""Bases of our optimizers: torch's own without its compiler, and one that updates each element by itself.

Several methods of torch's base class, and `step` of its Adam, import torch._dynamo at their first call, to exclude
themselves from torch.compile. That import costs each rank 2 to 4 seconds of its start and 100 MiB, also in runs that
compile nothing. The classes here have the methods inside of torch's decorators."""

import inspect
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .contract import initialize_state


class EagerOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` that is never part of compiled code."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.step_group(group)
        return loss

    def step_group(self, group: dict[str, Any]) -> None:
        """Update the parameters of a group."""
        raise NotImplementedError


class EagerAdamW(EagerOptimizer, torch.optim.AdamW):
    """torch's AdamW without torch's compiler."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return inspect.unwrap(torch.optim.AdamW.step)(self, closure)


def decay_cautiously(parameter: Tensor, step: Tensor, amount: float) -> None:
    """Decay the elements that the step, which is subtracted from them, moves towards 0 anyway (or does not move).

    Cautious weight decay (Chen et al. 2025, arXiv 2510.12402), in place.

    Args:
        step: of the shape of the parameter. Only its signs matter.
        amount: learning rate times weight decay.
    """
    if amount:
        parameter.sub_(parameter * (step * parameter >= 0), alpha=amount)


class ElementwiseOptimizer(EagerOptimizer):
    """A subclass defines the update of one parameter. Its states are those in `state_names`."""

    @abstractmethod
    def update(self, group: Mapping[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        """Update a parameter and its states in place.

        Args:
            gradient: of the parameter's type.
        """

    def step_group(self, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        initialize_state(self, group, parameters)
        for parameter in parameters:
            self.update(group, parameter, parameter.grad.to(parameter.dtype))
