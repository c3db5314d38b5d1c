"""Base of optimizers that update each element of a parameter by itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .base import EagerOptimizer
from .contract import initialize_state


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
