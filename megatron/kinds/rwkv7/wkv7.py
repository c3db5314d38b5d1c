"""The recurrence of RWKV-7 (Peng et al. 2025) as matrix products over chunks of the sequence.

Shapes: B samples, S positions, h heads of N channels, c chunks of Q positions, m = c B h. Per head, with S [N values, N
keys]:

    S_t = S_{t-1} (diag(w_t) + a_t b_t^T) + v_t k_t^T          0.54 < w < 1
    y_t = S_t r_t

Inside a chunk, u_t = S_{t-1} a_t follows from the u of earlier tokens: a unit lower triangular system, which is solved
for all chunks at once. Only the state goes from chunk to chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .wkv7_gradient import Documents, ForwardChunks, in_chunks, wkv7_gradient


def wkv7(
    r_BShN: Tensor,
    log_w_BShN: Tensor,
    k_BShN: Tensor,
    v_BShN: Tensor,
    a_BShN: Tensor,
    b_BShN: Tensor,
    *,
    chunk: int,
    initial_BhNN: Tensor | None = None,
    starts_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y [B, S, h, N] and the state after the last position [B, h, N, N], of fp32 tensors.

    Keeps its intermediate tensors for the gradient, so `recomputed` should call it.

    Args:
        log_w_BShN: between -0.61 and 0: a chunk's decays and their inverses are then within fp32's range.
        initial_BhNN: state before the first position. Zero if None.
        starts_BS: index of the first token of each token's document (`document_starts`): states do not cross it.
    """
    inputs = (r_BShN, log_w_BShN, k_BShN, v_BShN, a_BShN, b_BShN, initial_BhNN)
    chunk = min(chunk, r_BShN.shape[1])
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in inputs):
        return _WKV7.apply(*inputs, starts_BS, chunk)
    return _wkv7(*inputs, starts_BS, chunk)[:2]


def left_of_state(
    log_w_BShN: Tensor, a_BShN: Tensor, b_BShN: Tensor, *, chunk: int, starts_BS: Tensor | None = None
) -> Tensor:
    """The factor [B, h, N, N] of a state before the sequence, from the right: the state after it from 1 and no
    values."""
    B, _, h, N = log_w_BShN.shape
    one = torch.eye(N, dtype=log_w_BShN.dtype, device=log_w_BShN.device).expand(B, h, N, N)
    none = torch.zeros_like(a_BShN)
    factors = (none, log_w_BShN, none, none, a_BShN, b_BShN)
    return wkv7(*factors, chunk=chunk, initial_BhNN=one.contiguous(), starts_BS=starts_BS)[1]


class _WKV7(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        y, final, chunks, documents = _wkv7(*inputs)
        ctx.continued, ctx.made = inputs[6] is not None, len(chunks)
        ctx.save_for_backward(*chunks, *documents)
        return y, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_y: Tensor, of_final: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        *found, of_initial = wkv7_gradient(
            of_y, of_final, ForwardChunks(*saved[: ctx.made]), Documents(*saved[ctx.made :])
        )
        return *found, of_initial if ctx.continued else None, None, None


def _wkv7(*inputs: Any) -> tuple[Tensor, Tensor, ForwardChunks, Documents]:
    r, log_w, k, v, a, b, initial, starts, chunk = inputs
    (B, length, h, N), Q = r.shape, chunk
    room = -length % chunk
    left, readers, writers, written = _factors(*(in_chunks(each, chunk, room) for each in (r, log_w, k, v, a, b)))
    documents = _documents(starts, length, chunk, room, h, r.device)
    scores = _product(readers, writers.mT).masked_fill_(documents.unseen, 0.0)
    # Forward substitution: a product of powers of the scores would lose all digits where keys repeat.
    unit = torch.eye(Q, dtype=r.dtype, device=r.device).expand(len(scores), Q, Q)
    inverse = torch.linalg.solve_triangular(-scores[:, :Q, :Q], unit, upper=False, left=False, unitriangular=True)
    reads, writes = readers, writers
    if documents.begun is not None and documents.ended is not None:
        reads, writes = readers * documents.begun, writers * documents.ended
    own = _product(inverse, _product(scores[:, :Q, Q:], written[:, Q:]))
    of_state = _product(inverse, reads[:, :Q])

    n, between = B * h, left[:, -1:].clone()
    between[:-n] *= left[n:, -1:]
    states = r.new_empty(len(readers) + n, N, N)
    states[:n] = 0.0 if initial is None else initial.flatten(0, 1) * left[:n, -1:]
    for begin in range(0, len(readers), n):
        now, after = slice(begin, begin + n), slice(begin + n, begin + 2 * n)
        state = states[now]
        written[now, :Q] = torch.baddbmm(own[now], of_state[now], state.mT)
        if documents.through is not None:
            state = state * documents.through[now]
        torch.baddbmm(state, written[now].mT, writes[now], out=states[after]).mul_(between[now])
    y = torch.baddbmm(_product(reads[:, Q:], states[:-n].mT), scores[:, Q:], written)
    y = y.unflatten(0, (-1, B, h)).permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length]
    chunks = ForwardChunks(left, between, readers, reads, writers, writes, scores, inverse, of_state, written, states)
    return y, states[-n:].unflatten(0, (B, h)).clone(), chunks, documents


def _factors(
    r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`ForwardChunks.left`, `readers`, `writers` and `written` without u, of tensors [c, B, h, Q, N]."""
    Q = r.shape[-2]
    # Sums of logarithms are float64: a difference of two large sums must keep the digits of a short stretch. Factors
    # are relative to the middle of the range, so that neither they nor their inverses are large.
    total = log_w.cumsum(-2, dtype=torch.float64)
    half = total[..., -1:, :] / 2
    left = r.new_empty(*r.shape[:3], Q + 1, r.shape[-1])
    left[..., :1, :] = -half
    torch.sub(total, half, out=left[..., 1:, :])
    before, after = left.exp_()[..., :-1, :], left[..., 1:, :]
    readers, writers, written = (r.new_empty(*r.shape[:3], 2 * Q, r.shape[-1]) for _ in range(3))
    torch.mul(a, before, out=readers[..., :Q, :])
    torch.mul(r, after, out=readers[..., Q:, :])
    torch.div(b, after, out=writers[..., :Q, :])
    torch.div(k, after, out=writers[..., Q:, :])
    written[..., Q:, :] = v
    return left.flatten(0, 2), readers.flatten(0, 2), writers.flatten(0, 2), written.flatten(0, 2)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """x y, in memory that is given: selective recomputation does not keep the result, so it may change."""
    return torch.bmm(x, y, out=x.new_empty(len(x), x.shape[1], y.shape[2]))


def _documents(
    starts_BS: Tensor | None, length: int, chunk: int, room: int, heads: int, device: torch.device
) -> Documents:
    square = torch.ones(chunk, chunk, dtype=torch.bool, device=device)
    unseen = torch.cat([square.triu(), square.triu(1)]).repeat(1, 2)
    if starts_BS is None:
        return Documents(unseen)
    starts = (
        F.pad(starts_BS.double(), (0, room), mode="replicate").unflatten(1, (-1, chunk)).transpose(0, 1)
    )  # [c, B, Q]
    first = torch.arange(0, length, chunk, device=device).view(-1, 1, 1)
    places = first + torch.arange(chunk, device=device)
    each = (
        unseen | (places.unsqueeze(-2) < starts.unsqueeze(-1)).repeat(1, 1, 2, 2),
        (starts < first).repeat(1, 1, 2).unsqueeze(-1),
        (places >= starts[..., -1:]).repeat(1, 1, 2).unsqueeze(-1),
        (starts[..., -1:] < first).unsqueeze(-1),
    )
    return Documents(*(of.repeat_interleave(heads, 1).flatten(0, 1) for of in each))
