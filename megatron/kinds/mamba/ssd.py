"""State-space duality (Dao and Gu 2024): the recurrence of Mamba-2 as matrix products over chunks of the sequence.

Shapes: B samples, S positions, c chunks of Q positions, h heads of P channels in g groups of r heads, N state elements.

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T      S [P, N] per head. A one negative number per head
    y_t = S_t C_t + D x_t                           B_t, C_t [N], shared by the heads of a group

The gradient is written out: autograd's own would keep or make again every intermediate tensor. k = r P channels of a
group. A state before a chunk is S, and Z is the addition of the chunk. The `decays` are L inside a chunk, E from its
begin, T to its end, and W through it. With X = dt x, per head and chunk

    Y = (C B^T * L) X + E (C S^T) + D x        Z = (T X)^T B        S' = W S + Z

Kernels of packages are loaded at the first call. They take whole sequences without a past."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.kinds.common.recurrence import recomputed as place
from megatron.kinds.common.recurrence.convolution import sequences
from megatron.kinds.common.recurrence.decays import chunk_product, decays
from megatron.kinds.common.recurrence.recomputed import recomputed
from megatron.parallel.layout.precision import at_least_fp32

from . import simple_gla

Four = tuple[Tensor, Tensor, Tensor, Tensor]
Limits = tuple[float, float | None]  # of time steps
NOTHING_LEFT = -106.0  # logarithm of a decay that is 0 in fp32, whose least number is 2**-149 = exp(-103.3)


def inside_gradient(y_BcQhP: Tensor, x_BcQhP: Tensor, scores_BcgQQ: Tensor, inside_BchQQ: Tensor) -> Four:
    """Of the products inside chunks.

    Args:
        y_BcQhP: gradient of Y.
        x_BcQhP: X.

    Returns:
        Gradients of X [B, c, h, Q, P] and of the scores [B, c, g, Q, Q]. Two of the logarithms of decays [B, c, Q, h]:
        summed over columns, and over rows.
    """
    groups = scores_BcgQQ.shape[2]
    y, x = (each.transpose(2, 3).contiguous() for each in (y_BcQhP, x_BcQhP))
    inside = inside_BchQQ.unflatten(2, (groups, -1))
    scores = scores_BcgQQ.unsqueeze(3)
    of_x = (inside * scores).flatten(2, 3).transpose(-1, -2) @ y
    of_weights = (y @ x.transpose(-1, -2)).unflatten(2, (groups, -1)).mul_(inside)
    of_scores = of_weights.sum(3)
    of_logarithms = of_weights.mul_(scores).flatten(2, 3)
    return of_x, of_scores, of_logarithms.sum(-1).transpose(2, 3), of_logarithms.sum(-2).transpose(2, 3)


def carry_gradient(
    of_read: Tensor, before: Tensor, through: Tensor, of_final: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the states, from the last chunk back.

    Args:
        of_read: gradient of the state before each chunk by what the chunk reads, [B, c, h, P, N].
        before: these states.
        through: W, [B, c, h].
        of_final: gradient of the state after the last chunk.

    Returns:
        of Z [B, c, h, P, N], of the initial state [B, h, P, N], of W [B, c, h].
    """
    state = torch.zeros_like(before[:, 0]) if of_final is None else at_least_fp32(of_final)
    written = torch.empty_like(before)
    for chunk in reversed(range(before.shape[1])):
        written[:, chunk] = state
        state = torch.addcmul(of_read[:, chunk], state, through[:, chunk, :, None, None])
    return written, state, (written * before).sum((-1, -2))


def ssd_gradient(
    of_y: Tensor,
    of_final: Tensor | None,
    dt_raw: Tensor,
    dt_bias: Tensor,
    limits: Limits,
    A_log: Tensor,
    D: Tensor,
    chunks: Four,
    decays: Four,
    before: Tensor,
) -> tuple[Tensor, ...]:
    """The gradients of all inputs of `ssd`.

    Args:
        of_y: [B, S, h, P].
        dt_raw: [B, S, h], before the bias.
        chunks: x, dt, B and C in chunks.
        decays: L, T, E and W.
        before: the state before each chunk.

    Returns:
        in fp32: of x, dt_raw, dt_bias, A_log, D, B, C and the initial state.
    """
    (x, dt, B, C), (inside, to_end, from_begin, through) = chunks, decays
    length, groups, heads = of_y.shape[1], B.shape[3], x.shape[3]

    def grouped(each: Tensor) -> Tensor:  # [B, c, Q, h, P] to [B, c, g, Q, k], a view
        return each.flatten(3, 4).unflatten(3, (groups, -1)).transpose(2, 3)

    def by_head(each: Tensor) -> Tensor:  # and back
        return each.transpose(2, 3).flatten(3, 4).unflatten(3, (heads, -1))

    y = F.pad(at_least_fp32(of_y), (0, 0, 0, 0, 0, x.shape[1] * x.shape[2] - length)).reshape(x.shape)
    steps, states = x * dt.unsqueeze(-1), before.flatten(2, 3).unflatten(2, (groups, -1))  # states [B, c, g, k, N]
    B_g, C_g = B.transpose(2, 3), C.transpose(2, 3)
    of_x_h, of_scores, rows, columns = inside_gradient(y, steps, C_g @ B_g.transpose(-1, -2), inside)

    y_begin = y * from_begin.unsqueeze(-1)
    read = by_head(C_g @ states.transpose(-1, -2))
    of_read = (grouped(y_begin).transpose(-1, -2) @ C_g).flatten(2, 3).view(before.shape)
    written, of_initial, of_through = carry_gradient(of_read, before, through, of_final)
    written = written.flatten(2, 3).unflatten(2, (groups, -1))
    of_end = by_head(B_g @ written.transpose(-1, -2)) * to_end.unsqueeze(-1)
    of_B = of_scores.transpose(-1, -2) @ C_g + grouped(steps * to_end.unsqueeze(-1)) @ written
    of_C = of_scores @ B_g + grouped(y_begin) @ states

    by_end = (steps * of_end).sum(-1).double()
    of_total = rows.double() - columns + (y_begin * read).sum(-1) - by_end
    of_total[:, :, -1] += by_end.sum(2) + of_through * through
    of_rate = of_total.flip(2).cumsum(2).flip(2)
    A = -A_log.exp()
    of_steps = of_end + of_x_h.transpose(2, 3)
    of_dt = ((of_steps * x).sum(-1) + of_rate * A).flatten(1, 2)[:, :length].to(x.dtype)
    raw = at_least_fp32(dt_raw) + dt_bias
    step, (least, most) = F.softplus(raw), limits
    of_dt = of_dt * torch.sigmoid(raw) * ((step >= least) & (True if most is None else step <= most))
    of_x = torch.addcmul(y * D.unsqueeze(-1), of_steps, dt.unsqueeze(-1)).flatten(1, 2)[:, :length]
    of_B, of_C = (each.transpose(2, 3).flatten(1, 2)[:, :length] for each in (of_B, of_C))
    of_A_log = (of_rate * dt).sum((0, 1, 2)).to(x.dtype) * A
    return of_x, of_dt, of_dt.sum((0, 1)), of_A_log, (y * x).sum((0, 1, 2, 4)), of_B, of_C, of_initial


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
    return final, chunk_product(through)[..., None, None]


class _SSD(torch.autograd.Function):
    """Keeps only its inputs for the gradient."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        *tensors, ctx.chunk, ctx.limits = inputs
        ctx.save_for_backward(*tensors)
        return place.call(_ssd, *inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_y: Tensor, of_final: Tensor | None) -> tuple[Tensor | None, ...]:
        return *place.call(_gradients, of_y, of_final, *ctx.saved_tensors, ctx.chunk, ctx.limits), None, None, None


def _gradients(of_y: Tensor, of_final: Tensor | None, *given: Any) -> tuple[Tensor | None, ...]:
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


def ssd_of_mamba_ssm(
    *inputs: Tensor,
    chunk: int,
    limits: Limits = (0.0, None),
    initial_BhPN: None = None,
    starts_BS: Tensor | None = None,
) -> tuple[Tensor, None]:
    """See `ssd`. No state is returned. Chunks have a power of two of tokens, at least 16."""
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
    parts: tuple[Callable[..., tuple[Tensor, ...]], Callable[..., Tensor]] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """See `ssd`: gated linear attention with one decay for each head, of queries C, keys B and values dt x.

    No state is returned, and only the inputs are kept for the gradient. The kernels choose their own chunks. torch
    computes inputs in fp32, which they would round.

    Args:
        parts: `gated_rows` and `gated_output`, or their compiled forms.
    """
    if inputs[0].dtype == torch.float32:
        return ssd(*inputs, chunk=chunk, limits=limits, starts_BS=starts_BS)
    attention = functools.partial(_gated_attention, parts or (gated_rows, gated_output), limits, starts_BS)
    return recomputed(attention, *inputs), None


def gated_rows(
    x: Tensor, dt: Tensor, dt_bias: Tensor, A_log: Tensor, B: Tensor, C: Tensor, starts: Tensor | None, limits: Limits
) -> tuple[Tensor, ...]:
    """Queries, keys and values of each head, and the logarithms of its decays.

    The state decays to zero at the first token of a document. With bounds of documents the host would wait in each
    layer for sizes of the kernels' buffers, which depend on them."""
    step = F.softplus(at_least_fp32(dt) + dt_bias)
    step = step if limits == (0.0, None) else step.clamp(*limits)
    share = x.shape[2] // B.shape[2]
    query, key = torch.stack([C, B]).repeat_interleave(share, 3)  # one kernel
    decay = step * -A_log.exp()
    if starts is not None:
        places = torch.arange(x.shape[1], device=x.device)
        decay = decay.masked_fill(((starts == places) & (places > 0)).unsqueeze(-1), NOTHING_LEFT)
    return query, key, (x * step.unsqueeze(-1)).to(x.dtype), decay


def gated_output(y: Tensor, x: Tensor, D: Tensor) -> Tensor:
    return (y + D.unsqueeze(-1) * x).to(x.dtype)


def _gated_attention(
    parts: tuple[Callable, Callable], limits: Limits, starts: Tensor | None, *inputs: Tensor
) -> Tensor:
    x, dt, dt_bias, A_log, D, B, C = inputs
    rows_of, output_of = parts
    rows = rows_of(x, dt, dt_bias, A_log, B, C, starts, limits)
    return output_of(simple_gla.by_kernels(*(each.contiguous() for each in rows)), x, D)


SCANS: Mapping[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "torch": ssd,
    "mamba_ssm": ssd_of_mamba_ssm,
    "fla": ssd_of_fla,
}
