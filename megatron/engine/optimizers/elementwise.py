"""What optimizers have in common that update each parameter, or part of one, by itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .base import EagerOptimizer
from .contract import initialize_state


class ElementwiseOptimizer(EagerOptimizer):
    """An optimizer that says how one parameter is updated; its states are those that `state_names` declares."""

    @abstractmethod
    def update(self, group: Mapping[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        """Update a parameter and its states in place.

        Args:
            gradient: of the parameter's type.
        """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            initialize_state(self, group, parameters)
            for parameter in parameters:
                self.update(group, parameter, parameter.grad.to(parameter.dtype))
        return loss
