"""The contract between engine and optimizer, in this folder and in users' packages.

Torch's optimizers make their state in the first step. A resumed run has to put tensors there before. DeepSpeed's
ZeRO 1 and 2 inspect the state once, after the first group's first step, and miss later groups. So each optimizer
declares its state, and the engine makes it."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from megatron.config import Config
from megatron.config.optimizer_kind import OptimizerKind
from megatron.config.parts import resolve_import
from megatron.config.problems import UserError
from megatron.config.registry import OPTIMIZER, load
from megatron.parallel.layout.shard import LogicalTensor

STEP = "step"  # the state with the number of updates, float32 0-d


class Optimizer(Protocol):
    """A `torch.optim.Optimizer` whose state can be cut anywhere, so that checkpoints have no layout.

    Its update must work element by element: ZeRO flattens the parameters of a group into one tensor and gives each rank
    a part of it. An optimizer that needs whole matrices is a `matrix.MatrixOptimizer`, which gets them on every layout.

    Optional members:

    * The classmethod `group_settings(config, logical) -> Mapping` gives further settings for the group of the parameter
    with this logical tensor, such as Muon's `matrix`. A setting `lr_scale` multiplies that of the parameter's role.
    `scales` replaces the logical tensor's (`Scales`), which are for steps whose elements do not depend on the
    size of gradients.
    * `numbers` names states that are one number: float64 tensors without dimensions, zero before the first step, the
    same for all parameters.
    * The method `fingerprints() -> Mapping[str, str]` gives fingerprints of the files that its steps depend on, by the
    key that names the file. Checkpoints keep them. A run only resumes with the same ones, unless
    `checkpoint.allow_changes` has the key.
    * The method `evaluation_weights(group, weights, state) -> Tensor` gives the weights to be evaluated, saved and
    exported, if they differ from those at which gradients are taken. They follow from these and the parameter's
    states, element by element, for any subset of the elements. The engine puts them in the place of the parameters
    while it evaluates."""

    param_groups: list[dict[str, Any]]
    state: Mapping[Tensor, dict[str, Any]]

    @classmethod
    def build(cls, config: Config, groups: list[dict[str, Any]]) -> Self:
        """The optimizer of a resolved `Config`, for groups made by `parameter_groups`, with rates of 0."""

    def state_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of all states of each parameter of a group. Each is a tensor of the parameter's shape, zero before
        the first step. "step", a float32 count of updates, and those in `numbers` are 0-d."""

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
            f"the optimizer {type(optimizer).__name__} must declare its states, or checkpoints would lose them: "
            "give it a method state_names(group) (see megatron.engine.optimizers.contract)"
        )
    return tuple(declared(group))


def initialize_state(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameters: Iterable[Tensor] | None = None
) -> None:
    """Make the states of the first step, zero. Existing ones stay.

    Args:
        parameters: tensors that the group updates, by default its `params`. ZeRO 3 empties those and puts its flat
            tensors in, one at a time, for each step.
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
        TypeError: the optimizer keeps an undeclared state for this parameter, or one of another shape.
    """
    names, found = state_names(optimizer, group), {}
    for name, value in optimizer.state[parameter].items():
        if name in names and name in number_names(optimizer):
            continue
        if name not in names or not isinstance(value, Tensor) or value.shape != parameter.shape:
            what = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise TypeError(
                f"the optimizer {type(optimizer).__name__} keeps {name!r}, {what}, for a parameter of shape "
                f"{tuple(parameter.shape)}. Checkpoints keep only declared states ({', '.join(names) or 'none'}) of "
                "the parameter's shape, since ZeRO may cut a parameter anywhere"
            )
        found[name] = value
    return found


def number_names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Names of the states that are one number."""
    return (STEP, *getattr(optimizer, "numbers", ()))


def fingerprints(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Fingerprints of the files that it has read, by the key that names the file. Empty for most."""
    return dict(getattr(optimizer, "fingerprints", dict)())


def _first(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: Tensor, name: str) -> Tensor:
    if name == STEP:  # where torch keeps it: fused kernels read the count on the device
        return torch.zeros((), dtype=torch.float32, device=parameter.device if group.get("fused") else "cpu")
    if name in number_names(optimizer):
        return torch.zeros((), dtype=torch.float64)
    return torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False)


def group_settings(kind: type, config: Config, logical: LogicalTensor) -> Mapping[str, Any]:
    """Settings of an optimizer class for the group of a parameter. None by default."""
    ask = getattr(kind, "group_settings", None)
    return {} if ask is None else ask(config, logical)


def optimizer_class(config: Config) -> type[Optimizer]:
    """The class that `optimizer.type` names.

    Raises:
        UserError: it cannot be imported, or lacks a method of the contract.
    """
    found = resolve_import(config, "optimizer.type", OPTIMIZER, config.optimizer.type)
    if isinstance(found, OptimizerKind):
        found = load(found.update)
    missing = [name for name in ("build", "state_names", "step") if not callable(getattr(found, name, None))]
    if missing:
        raise UserError(
            f"optimizer.type = {config.optimizer.type!r} must have {', '.join(missing)}: "
            "see megatron.engine.optimizers.contract.Optimizer"
        )
    return found
