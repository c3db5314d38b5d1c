"""Constant multipliers of activations; most models have none."""

from __future__ import annotations

from torch import Tensor


def scaled(x: Tensor, multiplier: float) -> Tensor:
    """x * multiplier, and x itself for 1."""
    return x if multiplier == 1.0 else x * multiplier
