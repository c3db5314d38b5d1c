"""What the engine asks of an optimizer, whether it is one of this folder or one from a user's package.

Torch's optimizers make their state in the first step. A resumed run has to put tensors there before; and DeepSpeed's
ZeRO 1 and 2 look at the state once, after the first group's first step, and see nothing of the groups that come later.
So each optimizer declares its state, and the engine makes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from megatron.config import Config
from megatron.parallel.layout.shard import LogicalTensor

STEP = "step"  # a state that is a number: updates done, a float32 tensor without dimensions


class Optimizer(Protocol):
    """A `torch.optim.Optimizer` whose state can be cut and put together anywhere, so that checkpoints have no layout.

    Its update must work element by element: ZeRO flattens the parameters of a group into one tensor and gives each rank
    a part of it. One that needs whole matrices is a `matrix.MatrixOptimizer`, which gets them on every layout.

    Optionally it has the classmethod `group_settings(config, logical) -> Mapping`: further settings for the group of
    the parameter with this logical tensor, such as Muon's `matrix`. A setting `lr_scale` there multiplies that of the
    parameter's role, and `scales` replaces those of the logical tensor (`Scales`), which are for steps whose elements
    do not depend on the size of gradients.

    Optionally `numbers` names further states that are one number: float64 tensors without dimensions, zero before the
    first step, the same for all parameters.

    Optionally it has the method `fingerprints() -> Mapping[str, str]`: of what it has read from files and its steps
    follow from, by the key that names the file. Checkpoints keep them, and a run resumes with no others unless
    `checkpoint.allow_changes` has the key.

    Optionally it has the method `evaluation_weights(group, weights, state) -> Tensor`, where the weights to be
    evaluated, saved and exported are others than those at which gradients are taken. They follow, element by element,
    from the latter and the parameter's states, of all elements or of some of them. The engine puts them in the place of
    the parameters while it evaluates.
    """

    param_groups: list[dict[str, Any]]
    state: Mapping[Tensor, dict[str, Any]]

    @classmethod
    def build(cls, config: Config, groups: list[dict[str, Any]]) -> Self:
        """The optimizer of a resolved `Config`, for groups made by `parameter_groups`, with rates of 0."""

    def state_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of all states of each parameter of a group. Each is a tensor of the parameter's shape, zero before the
        first step; "step", if it is among them, is a float32 tensor without dimensions that counts updates, and those
        that `numbers` names have none either."""

    def step(self, closure: Any = None) -> Any:
        """Update the parameters that have gradients."""


def state_names(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the states of each parameter of a group, as the optimizer declares them.

    Raises:
        TypeError: it declares none, so checkpoints could not keep them.
    """
    declared = getattr(optimizer, "state_names", None)
    if declared is None:
        raise TypeError(
            f"the optimizer {type(optimizer).__name__} does not say which states it keeps, so checkpoints would lose "
            "them; give it a method state_names(group) (see megatron.engine.optimizers.contract)"
        )
    return tuple(declared(group))


def initialize_state(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameters: Iterable[Tensor] | None = None
) -> None:
    """Make the state that the first step would make, zero; state that is there already stays.

    Args:
        group: one of the optimizer's groups.
        parameters: what the group is or will be asked to update; its `params` by default. ZeRO 3 empties those and puts
            its flat tensors in, one at a time, for each step.
    """
    names = state_names(optimizer, group)
    for parameter in group["params"] if parameters is None else parameters:
        state = optimizer.state[parameter]
        for name in names:
            if name not in state:
                state[name] = _first(optimizer, group, parameter, name)


def element_states(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    """The states that have one number per element of `parameter`, by name.

    Raises:
        TypeError: the optimizer keeps something for this parameter that it did not declare, or in another shape.
    """
    names, found = state_names(optimizer, group), {}
    for name, value in optimizer.state[parameter].items():
        if name in names and name in number_names(optimizer):
            continue
        if name not in names or not isinstance(value, Tensor) or value.shape != parameter.shape:
            what = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise TypeError(
                f"the optimizer {type(optimizer).__name__} keeps {name!r}, {what}, for a parameter of shape "
                f"{tuple(parameter.shape)}; checkpoints keep only declared states ({', '.join(names) or 'none'}) of "
                "the parameter's shape each, since ZeRO may cut a parameter anywhere"
            )
        found[name] = value
    return found


def number_names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Names of the states that are one number."""
    return (STEP, *getattr(optimizer, "numbers", ()))


def fingerprints(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Of what it has read from files, by the key that names the file; empty for most."""
    declared = getattr(optimizer, "fingerprints", None)
    return dict(declared()) if declared is not None else {}


def _first(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: Tensor, name: str) -> Tensor:
    if name == STEP:
        return _zero_step(group, parameter)
    return torch.zeros((), dtype=torch.float64) if name in number_names(optimizer) else _zeros(parameter)


def _zeros(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False)


def _zero_step(group: Mapping[str, Any], parameter: Tensor) -> Tensor:
    """Where torch keeps it: fused kernels read the count on the device."""
    return torch.zeros((), dtype=torch.float32, device=parameter.device if group.get("fused") else "cpu")


def group_settings(kind: type, config: Config, logical: LogicalTensor) -> Mapping[str, Any]:
    """What an optimizer class wants to know of the group of a parameter; nothing by default."""
    ask = getattr(kind, "group_settings", None)
    return {} if ask is None else ask(config, logical)
