"""State-space duality (Dao and Gu 2024): the recurrence of Mamba-2 as matrix products over chunks of the sequence.

Shapes: B samples, S positions, c chunks of Q positions, h heads of P channels in g groups of r heads, N state elements.

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T      S [P, N] per head; A one negative number per head
    y_t = S_t C_t + D x_t                           B_t, C_t [N], shared by the heads of a group
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from .recomputed import recomputed


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
    initial_BhPN: Tensor | None = None,
    starts_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The outputs and the state after the last position, both fp32 inside; only the inputs are kept for the gradient.

    Args:
        dt_BSh: before the bias and softplus.
        limits: time steps are clamped to these.
        initial_BhPN: state before the first position; zero if None.
        starts_BS: index of the first token of each token's document (`document_starts`): states do not cross it.

    Returns:
        y [B, S, h, P] of x's type, and the state [B, h, P, N] in fp32.
    """
    scan = functools.partial(_ssd, chunk=min(chunk, x_BShP.shape[1]), limits=limits)
    return recomputed(scan, x_BShP, dt_BSh, dt_bias_h, A_log_h, D_h, B_BSgN, C_BSgN, initial_BhPN, starts_BS)


def _ssd(x, dt, dt_bias, A_log, D, B, C, initial, starts, *, chunk: int, limits: tuple[float, float | None]):
    dtype, length = x.dtype, x.shape[1]
    x, B, C = x.float(), B.float(), C.float()
    groups = B.shape[2]
    dt = F.softplus(dt.float() + dt_bias).clamp(*limits)
    room = -length % chunk
    x_p, dt_p, B_p, C_p = (F.pad(each, (0, 0) * (each.dim() - 2) + (0, room)) for each in (x, dt, B, C))
    x_p, dt_p, B_p, C_p = (each.unflatten(1, (-1, chunk)) for each in (x_p, dt_p, B_p, C_p))
    inside, to_end, from_begin, through = decays(dt_p * -A_log.exp(), starts, room, chunk)

    steps = (x_p * dt_p.unsqueeze(-1)).unflatten(3, (groups, -1))  # dt x, [B, c, Q, g, r, P]
    scores = torch.einsum("bcqgn,bcsgn->bcgqs", C_p, B_p).unsqueeze(3) * inside.unflatten(2, (groups, -1))
    y = torch.einsum("bcgrqs,bcsgrp->bcqgrp", scores, steps)
    written = torch.einsum("bcsgn,bcsgrp->bcgrpn", B_p, steps * to_end.unflatten(3, (groups, -1)).unsqueeze(-1))
    before, final = _carry(written.flatten(2, 3), through, initial)
    read = torch.einsum("bcqgn,bcgrpn->bcqgrp", C_p, before.unflatten(2, (groups, -1)))
    y = (y + read * from_begin.unflatten(3, (groups, -1)).unsqueeze(-1)).flatten(3, 4).flatten(1, 2)[:, :length]
    return (y + D.unsqueeze(-1) * x).to(dtype), final


def decays(rate_BcQh: Tensor, starts_BS: Tensor | None, room: int, chunk: int):
    """What is left at one position of what was written at another, in fp32.

    Sums of rates are float64: a difference of two large sums must keep the digits of a short stretch.

    Returns:
        inside [B, c, h, Q, Q] from the column to the row, to_end [B, c, Q, h], from_begin [B, c, Q, h] of the state
        before the chunk, through [B, c, h] the whole chunk.
    """
    total = rate_BcQh.double().cumsum(2)
    last = total[:, :, -1:]
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=total.device).tril()[None, None, None]
    to_end, from_begin, through = (last - total).float().exp(), total.float().exp(), last[:, :, 0].float().exp()
    if starts_BS is not None:
        starts = F.pad(starts_BS.double(), (0, room), mode="replicate").unflatten(1, (-1, chunk))
        first = torch.arange(starts.shape[1], device=starts.device).view(1, -1, 1) * chunk
        places = first + torch.arange(chunk, device=starts.device)
        causal = causal & (places.unsqueeze(2) >= starts.unsqueeze(3)).unsqueeze(2)
        to_end = to_end * (places >= starts[:, :, -1:]).unsqueeze(-1)
        from_begin = from_begin * (starts < first).unsqueeze(-1)
        through = through * (starts[:, :, -1] < first[:, :, 0]).unsqueeze(-1)
    total = total.transpose(2, 3)
    inside = (total.unsqueeze(-1) - total.unsqueeze(-2)).float().masked_fill(~causal, float("-inf")).exp()
    return inside, to_end, from_begin, through


def _carry(written_BchPN: Tensor, through_Bch: Tensor, initial_BhPN: Tensor | None) -> tuple[Tensor, Tensor]:
    """The state before each chunk, [B, c, h, P, N], and after the last one."""
    state = torch.zeros_like(written_BchPN[:, 0]) if initial_BhPN is None else initial_BhPN.float()
    before = []
    for written, through in zip(written_BchPN.unbind(1), through_Bch.unbind(1)):
        before.append(state)
        state = state * through[..., None, None] + written
    return torch.stack(before, 1), state
