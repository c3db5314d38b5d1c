"""The gradient of RWKV-7's recurrence, written out: autograd's own would copy, fill and add more than it multiplies.

Shapes as in `wkv7`. Per head and chunk, with E what is `left` of the decays at a position relative to their middle, H
at the end, S the state relative to the middle, A = E_{t-1} a and R = E r the readers, B = b / E and K = k / E the
writers, and <X Y> for X Y^T where the writer comes before the reader (or, for R, with it):

    U = A S^T + <A B> U + <A K> V         Y = R S^T + <R B> U + <R K> V         S' = (S + U^T B + V^T K) H H'

With D the gradient of the sum in S', and P that of the right side of the system, dP = (1 - <A B>)^-T dU:

    dU = <R B>^T dY + B D^T               dV = <A K>^T dP + <R K>^T dY + K D^T
    dS = D + dP^T A + dY^T R              the scores' gradients are products of dP, dY with U, V
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class ForwardChunks(NamedTuple):
    """Tensors of the forward pass for all chunks.

    Attributes:
        left: decays from the middle of the chunk to its begin and to each position, [m, Q + 1, N].
        between: decays from the middle of a chunk to the middle of the next, or to the end of the last, [m, 1, N].
        readers: A over R, [m, 2 Q, N].
        reads: the same, 0 where the state before the chunk is another document's.
        writers: B over K, [m, 2 Q, N].
        writes: the same, 0 where the state after the chunk is another document's.
        scores: of all readers and writers, [m, 2 Q, 2 Q].
        inverse: of 1 - <A B>, [m, Q, Q].
        of_state: inverse A, [m, Q, N].
        written: U over V, [m, 2 Q, N].
        states: before each chunk, in the middle of its decays, and after the last, [m + B h, N, N].
    """

    left: Tensor
    between: Tensor
    readers: Tensor
    reads: Tensor
    writers: Tensor
    writes: Tensor
    scores: Tensor
    inverse: Tensor
    of_state: Tensor
    written: Tensor
    states: Tensor


class Documents(NamedTuple):
    """Masks of documents. Without documents only the first is set.

    Attributes:
        unseen: writers that a reader does not see, [m or none, 2 Q, 2 Q].
        begun: readers that see the state before their chunk, [m, 2 Q, 1].
        ended: writers that the state after the chunk depends on, [m, 2 Q, 1].
        through: whether the state after a chunk depends on the state before it, [m, 1, 1].
    """

    unseen: Tensor
    begun: Tensor | None = None
    ended: Tensor | None = None
    through: Tensor | None = None


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

    It overwrites its arguments.
    """
    Q, n = chunks.inverse.shape[-1], len(chunks.states) - len(chunks.left)
    by_reader, by_writer = of_readers.mul_(chunks.readers), of_writers.mul_(chunks.writers)
    of_total = by_reader[:, Q:].sub_(by_writer[:, :Q]).sub_(by_writer[:, Q:])
    of_total[:, :-1] += by_reader[:, 1:Q]  # a sees one decay less
    of_total[:, -1:] += (of_states[n:] * chunks.states[n:]).sum(-2, keepdim=True)
    summed = of_total.cumsum(-2, dtype=torch.float64)
    return torch.sub(summed[:, -1:], summed, out=torch.empty_like(of_total)).add_(of_total)
