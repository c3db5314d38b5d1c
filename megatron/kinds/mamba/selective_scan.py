"""The selective scan of Mamba (Gu and Dao 2023), a diagonal recurrence per channel, without a loop over tokens.

Shapes: B samples, S positions, d channels, N state elements per channel.

    S_t = exp(dt_t A) S_{t-1} + dt_t u_t B_t      S, A [d, N], A negative. B_t, C_t [N]
    y_t = (S_t C_t + D u_t) silu(z_t)

A chunk of up to `chunk` positions is scanned at a time, in about sqrt(chunk) runs of equal length side by side. The
scan is first inside the runs, then from run to run. States exist for one chunk only. They are made again for the
gradient."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kinds.common.recurrence.pieces import pieces
from megatron.kinds.common.recurrence.recomputed import recomputed
from megatron.parallel.layout.precision import at_least_fp32, wide_type


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
    initial_BdN: Tensor | None = None,
    starts_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The outputs and the state after the last position, fp32 inside.

    Args:
        dt_BSd: before the bias and softplus.
        initial_BdN: state before the first position. Zero if None.
        starts_BS: index of the first token of each token's document (`document_starts`): states do not cross it.

    Returns:
        y [B, S, d] of u's type, and the state [B, d, N] in fp32.
    """
    keep_BS = None
    if starts_BS is not None:
        keep_BS = (starts_BS != torch.arange(starts_BS.shape[1], device=starts_BS.device)).float()
    state = initial_BdN
    if state is None:
        state = u_BSd.new_zeros((u_BSd.shape[0], *A_log_dN.shape), dtype=wide_type(u_BSd.dtype))
    # split and not slices: the gradient of a split is one concatenation
    pieces = [each.split(chunk, 1) for each in (u_BSd, z_BSd, dt_BSd, B_BSN, C_BSN)]
    keeps = [None] * len(pieces[0]) if keep_BS is None else keep_BS.split(chunk, 1)
    outputs = []
    for u, z, dt, B, C, keep in zip(*pieces, keeps):
        y, state = recomputed(_scan, u, z, dt, dt_bias_d, A_log_dN, D_d, B, C, state, keep)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def ends(
    u_BSd: Tensor, dt_BSd: Tensor, bias_d: Tensor, A_log_dN: Tensor, B_BSN: Tensor, chunk: int, starts_BS: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The state [B, d, N] from zeros, and the decay of each number. Arguments are as in `selective_scan`."""
    state = u_BSd.new_zeros((u_BSd.shape[0], *A_log_dN.shape), dtype=wide_type(u_BSd.dtype))
    left = torch.ones_like(state)
    for parts, starts in pieces([u_BSd, dt_BSd, B_BSN], chunk, starts_BS):
        state, left = recomputed(_end, *parts, bias_d, A_log_dN, state, left, starts)
    return state, left


def _end(
    u: Tensor, dt: Tensor, B: Tensor, dt_bias: Tensor, A_log: Tensor, state: Tensor, left: Tensor, starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    A, dt = -A_log.exp(), F.softplus(at_least_fp32(dt) + dt_bias)
    total = dt.double().cumsum(1)  # a difference of two large sums must keep the digits of a short stretch
    last = total[:, -1:]
    to_end, through = ((each.to(dt.dtype).unsqueeze(-1) * A).exp() for each in (last - total, last[:, 0]))
    if starts is not None:
        places = torch.arange(u.shape[1], device=u.device)
        to_end = to_end * (places >= starts[:, -1:])[..., None, None]
        through = through * (starts[:, -1] < 0)[:, None, None]
    written = torch.einsum("bqdn,bqd,bqn->bdn", to_end, dt * at_least_fp32(u), at_least_fp32(B))
    return through * state + written, through * left


def _scan(*inputs: Any) -> tuple[Tensor, Tensor]:
    u, z, dt, dt_bias, A_log, D, B, C, initial, keep = inputs
    dtype, length = u.dtype, u.shape[1]
    u, B, C = (at_least_fp32(each) for each in (u, B, C))
    A = -A_log.exp()
    dt = F.softplus(at_least_fp32(dt) + dt_bias)
    run = max(1, math.isqrt(length))
    room = -length % run
    dt_r, step_r, B_r, C_r = (F.pad(each, (0, 0, 0, room)).unflatten(1, (-1, run)) for each in (dt, dt * u, B, C))
    keep_r = None
    if keep is not None:
        keep_r = F.pad(keep, (0, room), value=1.0).unflatten(1, (-1, run))[..., None, None]

    decay, since_begin = (
        (dt_r.unsqueeze(-1) * A).exp(),
        (dt_r.cumsum(2).unsqueeze(-1) * A).exp(),
    )  # [B, runs, run, d, N]
    if keep_r is not None:
        decay, since_begin = decay * keep_r, since_begin * keep_r.cumprod(2)
    written = step_r.unsqueeze(-1) * B_r.unsqueeze(3)
    inside = [written[:, :, 0]]
    for decay_t, written_t in zip(decay.unbind(2)[1:], written.unbind(2)[1:]):
        inside.append(decay_t * inside[-1] + written_t)
    before, state = [], initial
    for through, last in zip(since_begin[:, :, -1].unbind(1), inside[-1].unbind(1)):
        before.append(state)
        state = through * state + last
    states = torch.stack(inside, 2) + since_begin * torch.stack(before, 1).unsqueeze(2)
    y = torch.einsum("bqrdn,bqrn->bqrd", states, C_r).flatten(1, 2)[:, :length]
    return ((y + D * u) * F.silu(at_least_fp32(z))).to(dtype), state


def scan_of_mamba_ssm(
    *inputs: Tensor, chunk: int, initial_BdN: None = None, starts_BS: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """`selective_scan` of whole sequences without a past by the kernels of mamba_ssm, loaded at the first call.

    They give no state. A document that ends within a sample is what they cannot do: that is left to torch."""
    if starts_BS is not None:
        return selective_scan(*inputs, chunk=chunk, starts_BS=starts_BS)
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    u, z, dt, dt_bias, A_log, D, B, C = inputs
    u, z, dt, B, C = (each.transpose(1, 2).contiguous() for each in (u, z, dt, B, C))
    y_BdS = selective_scan_fn(u, dt, -A_log.exp(), B, C, D, z=z, delta_bias=dt_bias, delta_softplus=True)
    return y_BdS.transpose(1, 2), None
