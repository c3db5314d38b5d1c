"""The one rule for computing in a wider type than the stream's."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_fp32(x: Tensor) -> Tensor:
    """x in fp32 where its type is narrower, else as it is.

    What has to be exact (decays, routers, norms, losses) is computed so. A model whose parameters are float64 computes
    in float64 throughout, which is how tests compare it with others.
    """
    return x.to(wide_type(x.dtype))


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """fp32, or the given type where that is wider."""
    return torch.promote_types(dtype, torch.float32)
