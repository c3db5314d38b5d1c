"""Packages of fused kernels that layers can use instead of plain torch. Nothing here imports one."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True)
class Package:
    """A package that computes some kinds of layers faster, on GPUs.

    Attributes:
        kinds: the kinds of layers that have an adapter to it. A new adapter adds its kind here.
        fix: how to get it.
    """

    kinds: tuple[str, ...]
    fix: str


# In the order in which `model.kernels: auto` prefers them.
PACKAGES: dict[str, Package] = {
    "mamba_ssm": Package(("mamba", "mamba2"), "pip install mamba-ssm causal-conv1d"),
    "fla": Package(("gated_delta",), "pip install flash-linear-attention"),
}


def installed(package: str) -> bool:
    """Whether it can be found; whether it loads is seen when it is first used."""
    return importlib.util.find_spec(package) is not None
