"""The gradient of state-space duality, written out: autograd's own would keep or make again every intermediate tensor.

Shapes as in `ssd`, c chunks of Q positions, h heads of P channels in g groups of r heads, k = r P channels of a group.
A state before a chunk is S, and Z is the addition of the chunk. The `decays` are L inside a chunk, E from its begin, T
to its end, and W through it. With X = dt x, per head and chunk

    Y = (C B^T * L) X + E (C S^T) + D x        Z = (T X)^T B        S' = W S + Z
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel.layout.precision import at_least_fp32

Four = tuple[Tensor, Tensor, Tensor, Tensor]
Limits = tuple[float, float | None]  # of time steps


def inside_gradient(y_BcQhP: Tensor, x_BcQhP: Tensor, scores_BcgQQ: Tensor, inside_BchQQ: Tensor) -> Four:
    """Of the products inside chunks.

    Args:
        y_BcQhP: gradient of Y.
        x_BcQhP: X.

    Returns:
        of X [B, c, h, Q, P], of the scores [B, c, g, Q, Q], of the logarithms of decays, summed over columns and over
        rows, [B, c, Q, h] each.
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
