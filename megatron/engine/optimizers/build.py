"""From the configuration to a torch optimizer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from .groups import fused_available, parameter_groups
from .lion import Lion
from .muon import Muon
from .sgd import SGD


def build_optimizer(config, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a resolved `Config` for the parameters of this rank.

    The rates of its groups are 0 until `set_learning_rate` is called, so that an engine that tries a step while it
    starts changes no weight.

    Raises:
        ValueError: a parameter has no role, or the options contradict each other.
    """
    options = config.optimizer
    groups = parameter_groups(config, parameters)
    fused = options.fused and fused_available(p for group in groups for p in group["params"])
    # None, unlike False, lets torch choose its next best implementation.
    adam = {"lr": 0.0, "betas": tuple(options.betas), "eps": options.epsilon, "fused": fused or None}
    if options.type == "adamw":
        return torch.optim.AdamW(groups, **adam)
    if options.type == "lion":
        return Lion(groups, lr=0.0, betas=tuple(options.betas))
    if options.type == "sgd":
        return SGD(groups, lr=0.0, momentum=options.momentum, nesterov=options.nesterov)
    return Muon(groups, momentum=options.muon_momentum, **adam)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give each group its share of the scheduled learning rate (that of `optimizer.lr`)."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
