"""Mamba's scan by the kernels of mamba_ssm, for whole sequences without a past. Loaded at the first call.

A document that ends within a sample is what they cannot do: that is left to torch.
"""

from __future__ import annotations

from torch import Tensor

from . import selective_scan as scan_of_mamba


def selective_scan(
    u_BSd: Tensor,
    z_BSd: Tensor,
    dt_BSd: Tensor,
    dt_bias_d: Tensor,
    A_log_dN: Tensor,
    D_d: Tensor,
    B_BSN: Tensor,
    C_BSN: Tensor,
    *,
    chunk: int,
    initial_BdN: None = None,
    starts_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """See `selective_scan.selective_scan`. The kernel gives no state."""
    if starts_BS is not None:
        return scan_of_mamba.selective_scan(
            u_BSd, z_BSd, dt_BSd, dt_bias_d, A_log_dN, D_d, B_BSN, C_BSN, chunk=chunk, starts_BS=starts_BS
        )
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    u, z, dt, B, C = (each.transpose(1, 2).contiguous() for each in (u_BSd, z_BSd, dt_BSd, B_BSN, C_BSN))
    y_BdS = selective_scan_fn(u, dt, -A_log_dN.exp(), B, C, D_d, z=z, delta_bias=dt_bias_d, delta_softplus=True)
    return y_BdS.transpose(1, 2), None
