"""The state of our optimizers before the first step, for those who must know or fill it then.

Torch's optimizers make their state in the first step. A resumed run has to put tensors there before; and DeepSpeed's
ZeRO 1 and 2 look at the state once, after the first group's first step, and see nothing of the groups that come later.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .lion import Lion
from .muon import Muon
from .sgd import SGD


def state_names(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> tuple[str, ...]:
    """Names of the state tensors of a group, each of the shape of its parameter.

    Raises:
        TypeError: the optimizer is none that `build_optimizer` makes.
    """
    if isinstance(optimizer, Lion):
        return ("exp_avg",)
    if isinstance(optimizer, SGD):
        return ("momentum_buffer",) if group["momentum"] else ()
    if isinstance(optimizer, Muon) and group["matrix"]:
        return ("momentum_buffer",)
    if isinstance(optimizer, Muon | torch.optim.AdamW):
        return ("exp_avg", "exp_avg_sq")
    raise TypeError(f"the state of {type(optimizer).__name__} is not known here")


def initialize_state(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: Iterable[torch.Tensor] | None = None
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
        if "exp_avg_sq" in names and "step" not in state:
            # Where torch keeps it: fused kernels read the count on the device.
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if group["fused"] else "cpu")
        for name in names:
            if name not in state:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
