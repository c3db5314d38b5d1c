"""The optimizer of a configuration and its parameter groups: the settings of each parameter, from its role."""

from collections.abc import Callable, Hashable, Iterable
from typing import Any, cast

import torch
from torch import nn

from megatron.config import Config
from megatron.config.sections.recipe import OptimizerSection
from megatron.parallel.layers.parameters import is_spread
from megatron.parallel.layout.shard import Role

from ..deepspeed.buckets import in_buckets
from .contract import group_settings, optimizer_class


def parameter_groups(config: Config, parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Put each trainable parameter of this rank into exactly one group.

    Parameters with the same settings (multiplier of the learning rate, weight decay, betas, algorithm), the same type
    and the same ranks share a group, in their order. ZeRO makes one flat buffer per group, so fewer are better.

    Args:
        parameters: parameters with `.logical`. One that occurs twice (tied) counts once.

    Returns:
        Groups for a torch optimizer with the extra keys `name`, `roles`, `lr_scale` and `moe`, and the result of
            `group_settings`. `lr_scale` is a multiple of the scheduled rate. `moe` means experts that differ between
            data parallel ranks. They have `eps` where a parametrization changes it. `lr` is 0 until the schedule sets
            it.

    Raises:
        ValueError: a parameter has no `.logical`, or the optimizer cannot train it.
    """
    kind = optimizer_class(config)
    groups: dict[tuple, dict[str, Any]] = {}
    for parameter in dict.fromkeys(parameters):
        if not parameter.requires_grad:
            continue
        logical = getattr(parameter, "logical", None)
        if logical is None:
            raise ValueError(f"a parameter of shape {tuple(parameter.shape)} has no logical tensor, so no role")
        lr_scale, decay, own = _settings(config.optimizer, logical.role)
        own |= group_settings(kind, config, logical)
        scales = own.pop("scales", logical.scales)
        lr_scale *= own.pop("lr_scale", 1.0) * scales.lr
        decay *= scales.weight_decay
        if scales.epsilon != 1.0:
            own["eps"] = own.get("eps", config.optimizer.epsilon) * scales.epsilon
        key = (*sorted(own.items()), lr_scale, decay, parameter.dtype, is_spread(parameter))
        start = {"params": [], "lr": 0.0, "lr_scale": lr_scale, "weight_decay": decay, "roles": []}
        group = groups.setdefault(key, {**start, **own, "moe": is_spread(parameter)})
        group["params"].append(parameter)
        if logical.role.value not in group["roles"]:
            group["roles"].append(logical.role.value)
    for number, group in enumerate(groups.values()):
        group["name"] = f"{number}:{'+'.join(group['roles'])}"
    return list(groups.values())


def _settings(optimizer: OptimizerSection, role: Role) -> tuple[float, float, dict[str, Any]]:
    """Multiple of the rate, decay, and betas and epsilon of a role that differ, as torch names them."""
    options = optimizer.groups.get(role.value)
    if options is None:
        return 1.0, optimizer.weight_decay, {}
    averaging = {"betas": options.betas, "eps": options.epsilon}
    decay = optimizer.weight_decay if options.weight_decay is None else options.weight_decay
    return options.lr_scale, decay, {name: value for name, value in averaging.items() if value is not None}


def use_fused(config: Config, groups: list[dict[str, Any]]) -> bool:
    """Whether `optimizer.fused` is on and torch has fused kernels for these parameters' device and types."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    kinds = {(parameter.device.type, parameter.is_floating_point()) for parameter in parameters}
    available = bool(kinds) and all(device in ("cuda", "cpu") and floating for device, floating in kinds)
    return config.optimizer.fused and available


def build_optimizer(
    config: Config,
    parameters: Iterable[nn.Parameter],
    bucket: int = 0,
    apart: Callable[[nn.Parameter], Hashable] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer of a resolved `Config` for the parameters of this rank.

    The rates of its groups are 0 until `set_learning_rate` is called, so an engine's trial step at its start changes no
    weight.

    Args:
        bucket: elements of the largest parameter group. 0 sets no limit.
        apart: see `in_buckets`.

    Raises:
        ValueError: a parameter has no role, or the options contradict each other.
    """
    groups = parameter_groups(config, parameters)
    made = optimizer_class(config).build(config, in_buckets(groups, bucket, apart) if bucket else groups)
    return cast(torch.optim.Optimizer, made)  # as its contract says


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the scheduled rate (that of `optimizer.lr`) as `scheduled_lr` of each group, and the group's multiple of
    it as `lr`."""
    for group in optimizer.param_groups:
        group["lr"], group["scheduled_lr"] = lr * group["lr_scale"], lr
