"""Mamba's scan by the kernels of mamba_ssm, for whole sequences without a past. Loaded at the first call.

A document that ends within a sample is what they cannot do: that is left to torch.
"""

from __future__ import annotations

from torch import Tensor

from . import selective_scan as scan_of_mamba


def selective_scan(
    *inputs: Tensor, chunk: int, initial_BdN: None = None, starts_BS: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """See `selective_scan.selective_scan`. The kernel gives no state."""
    if starts_BS is not None:
        return scan_of_mamba.selective_scan(*inputs, chunk=chunk, starts_BS=starts_BS)
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    u, z, dt, dt_bias, A_log, D, B, C = inputs
    u, z, dt, B, C = (each.transpose(1, 2).contiguous() for each in (u, z, dt, B, C))
    y_BdS = selective_scan_fn(u, dt, -A_log.exp(), B, C, D, z=z, delta_bias=dt_bias, delta_softplus=True)
    return y_BdS.transpose(1, 2), None
