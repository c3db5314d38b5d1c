"""Mamba-2's scan by the kernels of mamba_ssm, for whole sequences without a past; loaded at the first call."""

from __future__ import annotations

import math

from torch import Tensor

from megatron.kinds.common.convolution_kernels import sequences


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
        seq_idx=sequences(starts_BS),
        dt_softplus=True,
        dt_limit=(least, math.inf if most is None else most),
    )
    return y, None
