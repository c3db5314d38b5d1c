"""Mamba-2's scan by packages of kernels, for whole sequences without a past. Loaded at the first call."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kinds.common.documents import document_bounds
from megatron.kinds.common.recurrence.convolution_kernels import sequences
from megatron.kinds.common.recurrence.recomputed import recomputed
from megatron.parallel.layout.precision import at_least_fp32

from . import ssd as plain
from .ssd_gradient import Limits


def ssd_of_mamba_ssm(
    *inputs: Tensor,
    chunk: int,
    limits: Limits = (0.0, None),
    initial_BhPN: None = None,
    starts_BS: Tensor | None = None,
) -> tuple[Tensor, None]:
    """See `ssd.ssd`. No state is returned. Chunks have a power of two of tokens, at least 16."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    x, dt, dt_bias, A_log, D, B, C = inputs
    tokens = chunk if chunk >= 16 and chunk & (chunk - 1) == 0 else 256
    least, most = limits
    y = mamba_chunk_scan_combined(
        x,
        dt,
        -A_log.exp(),
        B,
        C,
        tokens,
        D=D,
        dt_bias=dt_bias,
        seq_idx=sequences(starts_BS),
        dt_softplus=True,
        dt_limit=(least, math.inf if most is None else most),
    )
    return y, None


def ssd_of_fla(
    *inputs: Tensor,
    chunk: int,
    limits: Limits = (0.0, None),
    initial_BhPN: None = None,
    starts_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """See `ssd.ssd`: gated linear attention with one decay for each head, of queries C, keys B and values dt x.

    No state is returned, and only the inputs are kept for the gradient. The kernels choose their own chunks. torch
    computes inputs in fp32, which they would round.
    """
    if inputs[0].dtype == torch.float32:
        return plain.ssd(*inputs, chunk=chunk, limits=limits, starts_BS=starts_BS)
    bounds = None if starts_BS is None else document_bounds(starts_BS)
    return recomputed(functools.partial(_gated_attention, limits=limits, bounds=bounds), *inputs), None


def _gated_attention(*inputs: Tensor, limits: Limits, bounds: Tensor | None) -> Tensor:
    from fla.ops.simple_gla import chunk_simple_gla

    x, dt, dt_bias, A_log, D, B, C = inputs
    step = F.softplus(at_least_fp32(dt) + dt_bias).clamp(*limits)
    share = x.shape[2] // B.shape[2]
    query, key = (each.repeat_interleave(share, 2) for each in (C, B))
    rows = [query, key, (x * step.unsqueeze(-1)).to(x.dtype), step * -A_log.exp()]
    if bounds is not None:  # documents of all samples one after another, as one sample
        rows = [each.flatten(0, 1).unsqueeze(0) for each in rows]
    y, _ = chunk_simple_gla(*(each.contiguous() for each in rows), scale=1.0, cu_seqlens=bounds)
    return (y.view_as(x) + D.unsqueeze(-1) * x).to(x.dtype)


SCANS: Mapping[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "torch": plain.ssd,
    "mamba_ssm": ssd_of_mamba_ssm,
    "fla": ssd_of_fla,
}
