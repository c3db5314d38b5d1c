"""State-space duality (Dao and Gu 2024): the recurrence of Mamba-2 as matrix products over chunks of the sequence.

Shapes: B samples, S positions, c chunks of Q positions, h heads of P channels in g groups of r heads, N state elements.

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T      S [P, N] per head. A one negative number per head
    y_t = S_t C_t + D x_t                           B_t, C_t [N], shared by the heads of a group
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.kinds.common.recurrence import recomputed
from megatron.kinds.common.recurrence.decays import decays
from megatron.parallel.layout.precision import at_least_fp32

from .ssd_gradient import Four, Limits, ssd_gradient


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
    limits: Limits = (0.0, None),
    initial_BhPN: Tensor | None = None,
    starts_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The outputs and the state after the last position, both fp32 inside. Only the inputs are kept for the gradient.

    Args:
        dt_BSh: before the bias and softplus.
        limits: time steps are clamped to these.
        initial_BhPN: state before the first position. Zero if None.
        starts_BS: index of the first token of each token's document (`document_starts`): states do not cross it.

    Returns:
        y [B, S, h, P] of x's type, and the state [B, h, P, N] in fp32.
    """
    inputs = (x_BShP, dt_BSh, dt_bias_h, A_log_h, D_h, B_BSgN, C_BSgN, initial_BhPN)
    chunk = min(chunk, x_BShP.shape[1])
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in inputs):
        return _SSD.apply(*inputs, starts_BS, chunk, limits)
    return _ssd(*inputs, starts_BS, chunk, limits)


def ends(*inputs: Any, chunk: int, limits: Limits) -> tuple[Tensor, Tensor]:
    """The state [B, h, P, N] from zeros, and its decay over the sequence [B, h, 1, 1]. `recomputed` should call it.

    Args:
        inputs: x, dt, dt_bias, A_log, B and starts of `ssd`.
    """
    x, dt, dt_bias, A_log, B, starts = inputs
    chunks, (_, to_end, _, through) = _chunks((x, dt, dt_bias, A_log, B, B), starts, min(chunk, x.shape[1]), limits)
    _, final = _carry(_written(chunks, to_end), through, None)
    return final, through.prod(1)[..., None, None]


class _SSD(torch.autograd.Function):
    """Keeps only its inputs for the gradient."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        *tensors, ctx.chunk, ctx.limits = inputs
        ctx.save_for_backward(*tensors)
        return recomputed.call(_ssd, *inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_y: Tensor, of_final: Tensor | None) -> tuple[Tensor | None, ...]:
        return *recomputed.call(_gradients, of_y, of_final, *ctx.saved_tensors, ctx.chunk, ctx.limits), None, None, None


def _gradients(of_y: Tensor, of_final: Tensor | None, *given: Any) -> tuple[Tensor | None, ...]:
    """Gradients of the inputs but the last three, None for missing inputs."""
    x, dt, dt_bias, A_log, D, B, C, initial, starts, chunk, limits = given
    chunks, left = _chunks((x, dt, dt_bias, A_log, B, C), starts, chunk, limits)
    before, _ = _carry(_written(chunks, left[1]), left[3], initial)
    found = ssd_gradient(of_y, of_final, dt, dt_bias, limits, A_log, D, chunks, left, before)
    return tuple(None if each is None else own.to(each.dtype) for each, own in zip(given[:8], found))


def _chunks(inputs: tuple[Tensor, ...], starts: Tensor | None, chunk: int, limits: Limits) -> tuple[Four, Four]:
    """x, time steps, B and C in fp32, [B, c, Q, ...] with zeros behind the last position, and the `decays`."""
    x, dt, dt_bias, A_log, B, C = inputs
    dt = F.softplus(at_least_fp32(dt) + dt_bias).clamp(*limits)
    room = -x.shape[1] % chunk
    x, dt, B, C = (
        (F.pad(each, (0, 0) * (each.dim() - 2) + (0, room)) if room else each).unflatten(1, (-1, chunk))
        for each in (at_least_fp32(own) for own in (x, dt, B, C))
    )
    return (x, dt, B, C), decays(dt * -A_log.exp(), starts, room, chunk)


def _written(chunks: Four, to_end_BcQh: Tensor) -> Tensor:
    """Additions of each chunk to the state, [B, c, h, P, N]."""
    x, dt, B, _ = chunks
    steps = (x * (dt * to_end_BcQh).unsqueeze(-1)).flatten(3, 4).unflatten(3, (B.shape[3], -1))  # [B, c, Q, g, k]
    return torch.einsum("bcsgn,bcsgk->bcgkn", B, steps).flatten(2, 3).unflatten(2, x.shape[3:])


def _ssd(*inputs: Any) -> tuple[Tensor, Tensor]:
    x, dt, dt_bias, A_log, D, B, C, initial, starts, chunk, limits = inputs
    length, groups, heads = x.shape[1], B.shape[2], x.shape[2]
    chunks, left = _chunks((x, dt, dt_bias, A_log, B, C), starts, chunk, limits)
    (x_p, dt_p, B_p, C_p), (inside, to_end, from_begin, through) = chunks, left
    before, final = _carry(_written(chunks, to_end), through, initial)
    states = before.flatten(2, 3).unflatten(2, (groups, -1))
    read = torch.einsum("bcqgn,bcgkn->bcqgk", C_p, states).flatten(3, 4).unflatten(3, (heads, -1))
    scores = torch.einsum("bcqgn,bcsgn->bcgqs", C_p, B_p).unsqueeze(3) * inside.unflatten(2, (groups, -1))
    steps = (x_p * dt_p.unsqueeze(-1)).transpose(2, 3)  # [B, c, h, Q, P]
    y = (scores.flatten(2, 3) @ steps).transpose(2, 3)
    y = torch.addcmul(y, read, from_begin.unsqueeze(-1)).addcmul_(x_p, D.unsqueeze(-1))
    return y.flatten(1, 2)[:, :length].to(x.dtype), final


def _carry(written_BchPN: Tensor, through_Bch: Tensor, initial_BhPN: Tensor | None) -> tuple[Tensor, Tensor]:
    """The state before each chunk, [B, c, h, P, N], and after the last one."""
    state = torch.zeros_like(written_BchPN[:, 0]) if initial_BhPN is None else at_least_fp32(initial_BhPN)
    before = []
    for written, through in zip(written_BchPN.unbind(1), through_Bch.unbind(1)):
        before.append(state)
        state = state * through[..., None, None] + written
    return torch.stack(before, 1), state
