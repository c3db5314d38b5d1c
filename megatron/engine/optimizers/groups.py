"""Which settings each parameter is trained with: groups made from the roles of the parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from megatron.parallel.parameters import is_spread
from megatron.parallel.shard import Role

# Muon is made for matrices inside the blocks; embeddings, the head and everything else stay with AdamW.
MATRIX_ROLES = (Role.HIDDEN, Role.OUTPUT)


def parameter_groups(config, parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Put each trainable parameter of this rank into exactly one group.

    Parameters with the same settings (multiplier of the learning rate, weight decay, algorithm), the same type and the
    same ranks
    share a group, in the order in which they come: ZeRO lays a group out as one flat buffer, so fewer are better.

    Args:
        config: a resolved `Config`.
        parameters: parameters that carry `.logical`; a parameter that occurs twice (a tied one) counts once.

    Returns:
        Groups for a torch optimizer with the extra keys `name`, `roles`, `lr_scale` (the group's learning rate is
        this times the scheduled one), `matrix` (updated by Muon) and `moe` (experts, different ones on different data
        parallel ranks). `lr` is 0 until the schedule sets it.

    Raises:
        ValueError: a parameter has no `.logical`, or Muon is asked for with `optimizer.lr` 0.
    """
    optimizer = config.optimizer
    if optimizer.type == "muon" and optimizer.lr == 0:
        raise ValueError("optimizer.lr: muon's matrices follow the schedule of optimizer.lr, which must be above 0")
    groups: dict[tuple, dict[str, Any]] = {}
    for parameter in dict.fromkeys(parameters):
        if not parameter.requires_grad:
            continue
        logical = getattr(parameter, "logical", None)
        if logical is None:
            raise ValueError(f"a parameter of shape {tuple(parameter.shape)} has no logical tensor, so no role")
        lr_scale, decay = _settings(optimizer, logical.role)
        whole = len(logical.shape) == 2 or logical.matrices is not None  # or experts: matrices in a stack
        matrix = optimizer.type == "muon" and logical.role in MATRIX_ROLES and whole
        if matrix:
            lr_scale *= optimizer.muon_lr / optimizer.lr
        key = (matrix, lr_scale, decay, parameter.dtype, is_spread(parameter))
        group = groups.setdefault(
            key,
            {
                "params": [],
                "lr": 0.0,
                "lr_scale": lr_scale,
                "weight_decay": decay,
                "matrix": matrix,
                "roles": [],
                "moe": is_spread(parameter),
            },
        )
        group["params"].append(parameter)
        if logical.role.value not in group["roles"]:
            group["roles"].append(logical.role.value)
    for number, group in enumerate(groups.values()):
        group["name"] = f"{number}:{'+'.join(group['roles'])}"
    return list(groups.values())


def _settings(optimizer, role: Role) -> tuple[float, float]:
    """The multiplier of the learning rate and the weight decay of a role."""
    options = optimizer.groups.get(role.value)
    if options is None:
        return 1.0, optimizer.weight_decay
    return options.lr_scale, optimizer.weight_decay if options.weight_decay is None else options.weight_decay


def describe(config, groups: list[dict[str, Any]]) -> str:
    """A table of the groups for people: algorithm, roles, number of tensors and parameters, settings."""
    rows = [("algorithm", "roles", "tensors", "parameters", "type", "peak lr", "weight decay")]
    for group in groups:
        counts = Counter(parameter.logical.role.value for parameter in group["params"])
        rest = "adamw" if config.optimizer.type == "muon" else config.optimizer.type
        rows.append((
            "muon" if group["matrix"] else rest,
            ", ".join(f"{role} {count}" for role, count in counts.items()),
            str(len(group["params"])),
            # Under ZeRO 3 a parameter's own tensor is empty and DeepSpeed keeps the number.
            f"{sum(getattr(parameter, 'ds_numel', parameter.numel()) for parameter in group['params']):,}",
            str(group["params"][0].dtype).removeprefix("torch."),
            f"{group['lr_scale'] * config.optimizer.lr:.4g}",
            f"{group['weight_decay']:g}",
        ))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def fused_available(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether torch has fused optimizer kernels for these parameters' device and types."""
    kinds = {(parameter.device.type, parameter.is_floating_point()) for parameter in parameters}
    return bool(kinds) and all(device in ("cuda", "cpu") and floating for device, floating in kinds)
