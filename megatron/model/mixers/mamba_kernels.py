"""The scans and convolutions of Mamba and Mamba-2 by the kernels of mamba_ssm and causal_conv1d.

Each function takes what the torch function of its name takes and gives the same, for whole sequences without a past.
What the kernels cannot do (a document that ends within a sample, in Mamba's scan; other numbers of taps) is left to
torch. The packages are loaded at the first call.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.config.kernels import installed

from . import convolution
from . import selective_scan as scan_of_mamba


def causal_convolution(
    x_BSC: Tensor, weight_C1K: Tensor, bias_C: Tensor | None, past_BKC: None = None, starts_BS: Tensor | None = None
) -> Tensor:
    """See `convolution.causal_convolution`."""
    if not (installed("causal_conv1d") and 2 <= weight_C1K.shape[-1] <= 4 and x_BSC.shape[-1] % 8 == 0):
        return convolution.causal_convolution(x_BSC, weight_C1K, bias_C, None, starts_BS)
    from causal_conv1d import causal_conv1d_fn

    y_BCS = causal_conv1d_fn(
        x_BSC.transpose(1, 2), weight_C1K.squeeze(1), bias_C, seq_idx=_sequences(starts_BS), activation="silu"
    )
    return y_BCS.transpose(1, 2)


def ssd(
    x_BShP: Tensor,
    dt_BSh: Tensor,
    dt_bias_h: Tensor,
    A_log_h: Tensor,
    D_h: Tensor,
    B_BSgN: Tensor,
    C_BSgN: Tensor,
    *,
    chunk: int,
    limits: tuple[float, float | None] = (0.0, None),
    initial_BhPN: None = None,
    starts_BS: Tensor | None = None,
) -> tuple[Tensor, None]:
    """See `ssd.ssd`; no state is returned. Chunks have a power of two of tokens, at least 16."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    tokens = chunk if chunk >= 16 and chunk & (chunk - 1) == 0 else 256
    least, most = limits
    y = mamba_chunk_scan_combined(
        x_BShP,
        dt_BSh,
        -A_log_h.exp(),
        B_BSgN,
        C_BSgN,
        tokens,
        D=D_h,
        dt_bias=dt_bias_h,
        seq_idx=_sequences(starts_BS),
        dt_softplus=True,
        dt_limit=(least, math.inf if most is None else most),
    )
    return y, None


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
    """See `selective_scan.selective_scan`; the kernel gives no state."""
    if starts_BS is not None:
        return scan_of_mamba.selective_scan(
            u_BSd, z_BSd, dt_BSd, dt_bias_d, A_log_dN, D_d, B_BSN, C_BSN, chunk=chunk, starts_BS=starts_BS
        )
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    u, z, dt, B, C = (each.transpose(1, 2).contiguous() for each in (u_BSd, z_BSd, dt_BSd, B_BSN, C_BSN))
    y_BdS = selective_scan_fn(u, dt, -A_log_dN.exp(), B, C, D_d, z=z, delta_bias=dt_bias_d, delta_softplus=True)
    return y_BdS.transpose(1, 2), None


def _sequences(starts_BS: Tensor | None) -> Tensor | None:
    """Numbers of documents: tokens are of one document where their starts are equal."""
    return None if starts_BS is None else starts_BS.to(torch.int32)
