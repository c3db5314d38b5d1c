"""The recurrence of RWKV-7 (Peng et al. 2025) as matrix products over chunks of the sequence.

Shapes: B samples, S positions, h heads of N channels, c chunks of Q positions, m = c B h. Per head, with S [N values, N
keys]:

    S_t = S_{t-1} (diag(w_t) + a_t b_t^T) + v_t k_t^T          0.54 < w < 1
    y_t = S_t r_t

Inside a chunk, u_t = S_{t-1} a_t follows from the u of earlier tokens: a unit lower triangular system, which is solved
for all chunks at once. Only the state goes from chunk to chunk.

The gradient is written out: autograd's own would copy, fill and add more than it multiplies. Per head and chunk, E is
what is `left` of the decays at a position relative to their middle. H is the same at the end, and S the state relative
to the middle. The readers are `A = E_{t-1} a` and `R = E r`, and the writers `B = b / E` and `K = k / E`. <X Y> is
X Y^T where the writer comes before the reader (or, for R, with it):

    U = A S^T + <A B> U + <A K> V         Y = R S^T + <R B> U + <R K> V         S' = (S + U^T B + V^T K) H H'

With D the gradient of the sum in S', and P that of the right side of the system, dP = (1 - <A B>)^-T dU:

    dU = <R B>^T dY + B D^T               dV = <A K>^T dP + <R K>^T dY + K D^T
    dS = D + dP^T A + dY^T R              the scores' gradients are products of dP, dY with U, V
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class ForwardChunks(NamedTuple):
    """Tensors of the forward pass for all chunks."""

    left: Tensor  # decays from the middle of the chunk to its begin and to each position, [m, Q + 1, N]
    between: Tensor  # decays from the middle of a chunk to the middle of the next, or to the end of the last, [m, 1, N]
    readers: Tensor  # A over R, [m, 2 Q, N]
    reads: Tensor  # the same, 0 where the state before the chunk is another document's
    writers: Tensor  # B over K, [m, 2 Q, N]
    writes: Tensor  # the same, 0 where the state after the chunk is another document's
    scores: Tensor  # of all readers and writers, [m, 2 Q, 2 Q]
    inverse: Tensor  # of 1 - <A B>, [m, Q, Q]
    of_state: Tensor  # inverse A, [m, Q, N]
    written: Tensor  # U over V, [m, 2 Q, N]
    states: Tensor  # before each chunk, in the middle of its decays, and after the last, [m + B h, N, N]


class Documents(NamedTuple):
    """Masks of documents. Without documents only the first is set."""

    unseen: Tensor  # writers that a reader does not see, [m or none, 2 Q, 2 Q]
    begun: Tensor | None = None  # readers that see the state before their chunk, [m, 2 Q, 1]
    ended: Tensor | None = None  # writers that the state after the chunk depends on, [m, 2 Q, 1]
    through: Tensor | None = None  # whether the state after a chunk depends on the state before it, [m, 1, 1]


def in_chunks(x_BShN: Tensor, chunk: int, room: int) -> Tensor:
    """[c, B, h, Q, N], a view if chunks are full. Padding is 0."""
    x_BShN = F.pad(x_BShN, (0, 0, 0, 0, 0, room)) if room else x_BShN
    return x_BShN.unflatten(1, (-1, chunk)).permute(1, 0, 3, 2, 4)


def wkv7_gradient(of_y: Tensor, of_final: Tensor, chunks: ForwardChunks, documents: Documents) -> tuple[Tensor, ...]:
    """Gradients of r, log_w, k, v, a, b and the initial state, by the gradients of y [B, S, h, N] and the last state
    [B, h, N, N]."""
    (B, length, h, N), Q = of_y.shape, chunks.inverse.shape[-1]
    by_head, n = (-1, B, h), B * h
    begin, written, states = chunks.left[:n, -1:], chunks.written, chunks.states
    of_read = torch.empty_like(written)  # dP over dY
    of_read[:, Q:].unflatten(0, by_head).copy_(in_chunks(of_y, Q, -length % Q))
    of_written, of_sums, of_states = _carry_gradient(of_read[:, Q:], of_final.flatten(0, 1), chunks, documents.through)
    of_read[:, :Q] = chunks.inverse.mT @ of_written[:, :Q]
    of_v = torch.baddbmm(of_written[:, Q:], chunks.scores[:, :Q, Q:].mT, of_read[:, :Q])

    of_scores = torch.bmm(of_read, written.mT).masked_fill_(documents.unseen, 0.0)
    of_readers, of_writers = torch.bmm(of_read, states[:-n]), torch.bmm(written, of_sums)
    if documents.begun is not None and documents.ended is not None:
        of_readers, of_writers = of_readers * documents.begun, of_writers * documents.ended
    of_readers.baddbmm_(of_scores, chunks.writers)
    of_writers.baddbmm_(of_scores.mT, chunks.readers)

    found = [of_y.new_empty(B, len(written) // n * Q, h, N) for _ in range(6)]
    r, log_w, k, v, a, b = (in_chunks(each, Q, 0) for each in found)
    before, after = (each.unflatten(0, by_head) for each in (chunks.left[:, :-1], chunks.left[:, 1:]))
    torch.mul(of_readers[:, :Q].unflatten(0, by_head), before, out=a)
    torch.mul(of_readers[:, Q:].unflatten(0, by_head), after, out=r)
    torch.div(of_writers[:, :Q].unflatten(0, by_head), after, out=b)
    torch.div(of_writers[:, Q:].unflatten(0, by_head), after, out=k)
    v.copy_(of_v.unflatten(0, by_head))
    log_w.copy_(_decays_gradient(of_readers, of_writers, of_states, chunks).unflatten(0, by_head))
    return *(each[:, :length] for each in found), (of_states[:n] * begin).unflatten(0, (B, h))


def _carry_gradient(
    of_y: Tensor, of_final: Tensor, chunks: ForwardChunks, through: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """From the last chunk back: gradients of U over V (of V without the path by U), [m, 2 Q, N], D [m, N, N], gradients
    of the states."""
    n, Q = len(of_final), chunks.inverse.shape[-1]
    of_written = torch.bmm(chunks.scores[:, Q:].mT, of_y)
    of_states, of_sums = torch.empty_like(chunks.states), torch.empty_like(chunks.states[n:])
    of_states[-n:] = of_final
    for begin in reversed(range(0, len(of_sums), n)):
        now, after = slice(begin, begin + n), slice(begin + n, begin + 2 * n)
        of_sum = torch.mul(of_states[after], chunks.between[now], out=of_sums[now])
        of_u = of_written[now].baddbmm_(chunks.writes[now], of_sum.mT)[:, :Q]
        kept = of_sum if through is None else of_sum * through[now]
        of_state = torch.baddbmm(kept, of_y[now].mT, chunks.reads[now, Q:], out=of_states[now])
        of_state.baddbmm_(of_u.mT, chunks.of_state[now])
    return of_written, of_sums, of_states


def _decays_gradient(of_readers: Tensor, of_writers: Tensor, of_states: Tensor, chunks: ForwardChunks) -> Tensor:
    """Gradients of the logarithms, [m, Q, N]: a factor's gradient times the factor is a term of all decays up to its
    own.

    It overwrites its arguments."""
    Q, n = chunks.inverse.shape[-1], len(chunks.states) - len(chunks.left)
    by_reader, by_writer = of_readers.mul_(chunks.readers), of_writers.mul_(chunks.writers)
    of_total = by_reader[:, Q:].sub_(by_writer[:, :Q]).sub_(by_writer[:, Q:])
    of_total[:, :-1] += by_reader[:, 1:Q]  # a sees one decay less
    of_total[:, -1:] += (of_states[n:] * chunks.states[n:]).sum(-2, keepdim=True)
    summed = of_total.cumsum(-2, dtype=torch.float64)
    return torch.sub(summed[:, -1:], summed, out=torch.empty_like(of_total)).add_(of_total)


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
