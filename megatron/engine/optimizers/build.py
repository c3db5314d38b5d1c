"""From the configuration to a torch optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import nn

from megatron.config import Config

from .groups import parameter_groups
from .named import optimizer_class


def build_optimizer(config: Config, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a resolved `Config` for the parameters of this rank.

    The rates of its groups are 0 until `set_learning_rate` is called, so that an engine that tries a step while it
    starts changes no weight.

    Raises:
        ValueError: a parameter has no role, or the options contradict each other.
    """
    made = optimizer_class(config).build(config, parameter_groups(config, parameters))
    return cast(torch.optim.Optimizer, made)  # as its contract says


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give each group the scheduled learning rate (that of `optimizer.lr`) as `scheduled_lr`, and its share as `lr`."""
    for group in optimizer.param_groups:
        group["lr"], group["scheduled_lr"] = lr * group["lr_scale"], lr
