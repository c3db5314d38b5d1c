"""Ring attention: keys and values of a sequence pass from rank to rank (Liu et al. 2023).

Each rank keeps its queries. It computes with the keys that it has while the next ones arrive, and adds up parts of the
softmax by their log-sum-exp. In the backward pass keys go round once more, and their gradients with them, in fp32 at
least, until the last reader sends these home. A rank skips masked rectangles (later tokens, tokens out of the window or
of other documents). Keys go no further than to the last rank that reads any of them.

Shapes: as in `blocks`, with s tokens of a member of the ring."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from megatron.model.recompute import keep_whole
from megatron.parallel.layers.context import ContextGroup, TokenRun
from megatron.parallel.layout.mesh import Axis
from megatron.parallel.layout.precision import at_least_fp32
from megatron.parallel.messages.account import here

from .blocks import AttentionTile, finite, nothing_seen, tile_gradients, tile_output
from .pattern import Dropped, Pattern

if TYPE_CHECKING:
    from .chunked_keys import ChunkSource

PIECE, PIECES = 1024, 256  # least tokens of a piece, most pieces of a sequence, where one rank has all tokens
Range = tuple[int, int]  # the lowest and the highest document of a run's tokens


def mask_of(
    queries: TokenRun, keys: TokenRun, window: int | None, documents: Sequence[tuple[Range, Range]]
) -> str | None:
    """The mask of a rectangle: "none", "causal" or "some" (see `AttentionTile`). None: all of it is masked.

    Args:
        documents: the ranges of the queries' and the keys' documents, of each sample.
    """
    if keys.first >= queries.stop or (window is not None and queries.first - (keys.stop - 1) >= window):
        return None
    if documents and all(a[0] > b[1] or b[0] > a[1] for a, b in documents):
        return None
    apart = any(a[0] != a[1] or a != b for a, b in documents)
    reach = window is not None and queries.stop - 1 - keys.first >= window
    if apart or reach:
        return "some"
    if keys.stop <= queries.first:
        return "none"
    return "causal" if (keys.first, keys.stop) == (queries.first, queries.stop) else "some"


Masks = dict[tuple[int, int], str]  # of rectangles that are not all masked, by the first places of queries and keys


def masks_of(
    queries: Iterable[TokenRun], keys: Sequence[TokenRun], window: int | None, ranges: Mapping[int, list[Range]]
) -> Masks:
    """The masks of all rectangles of these runs.

    Args:
        ranges: documents of each run by its first place, one range per sample. Empty where they mask nothing.
    """
    masks = {}
    for own, other in product(queries, keys):
        documents = list(zip(ranges.get(own.first, ()), ranges.get(other.first, ())))
        if (mask := mask_of(own, other, window, documents)) is not None:
            masks[own.first, other.first] = mask
    return masks


def pieces_of(run: TokenRun, whole: int) -> tuple[TokenRun, ...]:
    """A run of a sequence of `whole` tokens, in pieces."""
    size = max(PIECE, -(-whole // PIECES))
    begins = range(0, run.length, size)
    return tuple(TokenRun(run.begin + at, run.first + at, min(size, run.length - at)) for at in begins)


@dataclass(frozen=True)
class Ring:
    """One rank's place in a ring, and which member reads whose keys."""

    context: ContextGroup  # the ranks that share the sequence
    members: tuple[int, ...]  # the ranks of the ring, in its order
    place: int  # the place of this rank
    runs: tuple[tuple[TokenRun, ...], ...]  # of each member's tokens
    masks: Masks  # of the rectangles
    hops: tuple[int, ...]  # number of ranks that each member's keys pass

    @classmethod
    def of(
        cls, context: ContextGroup, together: int, length: int, window: int | None, documents_BS: Tensor | None
    ) -> Ring:
        """The ring of this rank, where neighbourhoods of `together` ranks have `length` tokens each.

        Args:
            documents_BS: of the whole sequence. None where they mask nothing.
        """
        count = context.size // together
        runs = neighbourhoods(context, together, length)
        flat = [run for each in runs for run in each]
        masks = masks_of(flat, flat, window, ranges_of(documents_BS, flat))
        hops = [0] * count
        for owner, step in product(range(count), range(1, count)):
            if any((q.first, k.first) in masks for q, k in product(runs[(owner + step) % count], runs[owner])):
                hops[owner] = step
        members = tuple(place * together + context.rank % together for place in range(count))
        return cls(context, members, context.rank // together, runs, masks, tuple(hops))

    @classmethod
    def alone(cls, length: int, window: int | None, documents_BS: Tensor | None) -> Ring:
        """One rank that has the whole sequence, in pieces."""
        runs = pieces_of(TokenRun(0, 0, length), length)
        masks = masks_of(runs, runs, window, ranges_of(documents_BS, runs))
        return cls(ContextGroup(Axis(0, 1)), (0,), 0, (runs,), masks, (0,))

    def at(self, place: int) -> int:
        """The rank of the member at a place, modulo their number."""
        return self.members[place % len(self.members)]

    def home(self, own: Tensor) -> Home:
        """Collector of the gradients of keys and values, from the terms `own` of this rank."""
        return Home(self, own)

    def keys(self, kv: Tensor) -> Iterator[tuple[int, Tensor | None]]:
        """(owner, its keys and values) for each step, None where this rank gets none. The next ones arrive
        meanwhile."""
        for step in range(max(self.hops) + 1):
            owner, before = ((self.place - each) % len(self.members) for each in (step, step + 1))
            coming = torch.empty_like(kv) if self.hops[before] > step else None
            works = self.context.swap(
                [(self.at(self.place + 1), kv)] if self.hops[owner] > step else [],
                [] if coming is None else [(self.at(self.place - 1), coming)],
            )
            yield owner, (kv if self.hops[owner] >= step else None)
            _wait(works)
            kv = kv if coming is None else coming


@dataclass
class Home:
    """Gradients of keys and values on their way to the rank that owns the keys."""

    ring: Ring
    own: Tensor
    total: Tensor | None = None  # of the keys at the rank before, which come next
    works: Sequence[dist.Work] = ()
    arriving: Tensor | None = None

    def add(self, step: int, owner: int, more: Tensor | None) -> None:
        """Add the terms of this rank at a step. `more` is None where it had no keys."""
        self._settle()
        ring = self.ring
        if step == 0:
            if more is not None:
                self.own = self.own + more
            return
        if more is not None and self.total is not None:
            more = more + self.total
        before = (ring.place - step - 1) % len(ring.members)
        sent, received = [], []
        self.total = None
        if more is not None:
            further = ring.hops[owner] > step
            sent.append((ring.at(ring.place + 1) if further else ring.members[owner], more.contiguous()))
        if ring.hops[before] > step:
            self.total = torch.empty_like(self.own)
            received.append((ring.at(ring.place - 1), self.total))
        if ring.hops[ring.place] == step:
            self.arriving = torch.empty_like(self.own)
            received.append((ring.at(ring.place + step), self.arriving))
        self.works = ring.context.swap(sent, received)

    def done(self) -> Tensor:
        self._settle()
        return self.own

    def _settle(self) -> None:
        _wait(self.works)
        self.works = ()
        if self.arriving is not None:
            self.own, self.arriving = self.own + self.arriving, None


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


@dataclass(frozen=True)
class Task:
    """Attention of a layer to the keys of a source."""

    ring: Ring | ChunkSource
    pattern: Pattern
    documents_BS: Tensor | None  # of the whole sequence. None where they mask nothing.
    dropout: Dropped | None  # with the length of the whole sequence

    def rectangles(self, owner: int) -> Iterator[tuple[TokenRun, TokenRun, AttentionTile]]:
        """The rectangles of the own queries and the owner's keys that are not all masked."""
        for queries, keys in product(self.ring.runs[self.ring.place], self.ring.runs[owner]):
            mask = self.ring.masks.get((queries.first, keys.first))
            if mask is None:
                continue
            documents = None
            if self.documents_BS is not None and mask == "some":
                documents = self.documents_BS[:, queries.there], self.documents_BS[:, keys.there]
            yield queries, keys, AttentionTile(self.pattern, queries.first, keys.first, mask, documents, self.dropout)


class _RingAttention(torch.autograd.Function):
    """The output, and a number without a value. Autograd computes the gradient of a call that gets the number as
    `after` before that of this call."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks_n: Tensor | None, after: Tensor | None, task: Task
    ) -> tuple[Tensor, Tensor]:
        y, normalizer = (each.detach() for each in keep_whole(lambda: _forward(q, k, v, sinks_n, task)))
        ctx.task, ctx.layer = task, here()
        ctx.save_for_backward(q, k, v, y, normalizer, sinks_n)
        return y, y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, of_y: Tensor, of_done: Tensor) -> tuple[Any, ...]:
        q, k, v, y, normalizer, sinks_n = ctx.saved_tensors
        shared = (at_least_fp32(of_y) * at_least_fp32(y)).sum(-1)
        of_q, of_kv = _backward(q, k, v, y, normalizer, of_y.contiguous(), shared, ctx.task)
        of_k, of_v = of_kv.split([k.shape[-1], v.shape[-1]], -1)
        of_sinks = None
        if sinks_n is not None:
            share = (at_least_fp32(sinks_n).view(1, -1, 1) - normalizer).exp()
            of_sinks = -(share * shared).sum((0, 2)).to(sinks_n.dtype)
        return (
            of_q.to(q.dtype),
            of_k.to(k.dtype),
            of_v.to(v.dtype),
            of_sinks,
            (of_done if ctx.needs_input_grad[4] else None),
            None,
        )


def _forward(q: Tensor, k: Tensor, v: Tensor, sinks_n: Tensor | None, task: Task) -> tuple[Tensor, Tensor]:
    """The output, and the log-sum-exp of all logits (and sinks) of each query."""
    y, normalizer = nothing_seen(q, v)
    if sinks_n is not None:
        normalizer = sinks_n.to(y.dtype).view(1, -1, 1).expand_as(normalizer).clone()
    for owner, kv in task.ring.keys(torch.cat([k, v], -1)):
        if kv is None:
            continue
        for queries, keys, at in task.rectangles(owner):
            own_k, own_v = kv[:, :, keys.here].split([k.shape[-1], v.shape[-1]], -1)
            more, weight = tile_output(q[:, :, queries.here], own_k, own_v, at)
            before = normalizer[:, :, queries.here]
            both = torch.logaddexp(before, weight)
            old, new = ((each - finite(both)).exp().unsqueeze(-1) for each in (before, weight))
            y[:, :, queries.here] = y[:, :, queries.here] * old + more * new
            normalizer[:, :, queries.here] = both
    return y.to(q.dtype), normalizer


def _backward(
    q: Tensor, k: Tensor, v: Tensor, y: Tensor, normalizer: Tensor, of_y: Tensor, shared: Tensor, task: Task
) -> tuple[Tensor, Tensor]:
    """Gradients of the queries, and of the keys and values in one tensor."""
    kv = torch.cat([k, v], -1)
    of_q = torch.zeros_like(q, dtype=shared.dtype)
    home = task.ring.home(torch.zeros_like(kv, dtype=shared.dtype))
    for step, (owner, theirs) in enumerate(task.ring.keys(kv)):
        of_theirs = None
        if theirs is not None:
            of_theirs = torch.zeros_like(theirs, dtype=shared.dtype)
            for queries, keys, at in task.rectangles(owner):
                own_k, own_v = theirs[:, :, keys.here].split([k.shape[-1], v.shape[-1]], -1)
                mine = [each[:, :, queries.here] for each in (of_y, q, y, normalizer, shared)]
                more_q, more_k, more_v = tile_gradients(mine[0], mine[1], own_k, own_v, mine[2], mine[3], mine[4], at)
                of_q[:, :, queries.here] += more_q
                of_theirs[:, :, keys.here] += torch.cat([more_k, more_v], -1)
        home.add(step, owner, of_theirs)
    return of_q, home.done()


def attend_to(
    q: Tensor, k: Tensor, v: Tensor, sinks_n: Tensor | None, after: Tensor | None, task: Task
) -> tuple[Tensor, Tensor]:
    """Attention to the keys of the task's source.

    Args:
        after: second result of an earlier call, if this call's gradient must be computed before that of the earlier.
    """
    y, done = _RingAttention.apply(q, k, v, sinks_n, after, task)
    return y, done


def ring_attention(
    context: ContextGroup,
    together: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    documents_BS: Tensor | None,
    dropout: Dropped | None,
    sinks_n: Tensor | None,
    remember: Callable[[Any, Callable[[], Any]], Any],
) -> Tensor:
    """Causal attention of a neighbourhood's tokens to all before them. Arguments are as in `attend`.

    Args:
        together: ranks of a neighbourhood, which have the same tokens here and different heads.
        q: [B, n, s, D], k: [B, m, s, D], v: [B, m, s, E], in the order of the sequence.
        documents_BS: of the whole sequence.

    Returns:
        [B, n, s, E].
    """
    length = q.shape[2]
    key = ("ring", together, length, pattern.window)
    ring = remember(key, lambda: Ring.of(context, together, length, pattern.window, documents_BS))
    if dropout is not None:
        dropout = replace(dropout, length=length * context.size // together)
    return attend_to(q, k, v, sinks_n, None, Task(ring, pattern, documents_BS, dropout))[0]


def attend_in_pieces(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    documents_BS: Tensor | None,
    dropout: Dropped | None,
    sinks_n: Tensor | None,
    remember: Callable[[Any, Callable[[], Any]], Any],
) -> Tensor:
    """Causal attention of a whole sequence on this rank, in memory that grows only with its length.

    Arguments and result are as in `attend`, with equal numbers of queries and keys."""
    length = q.shape[2]
    ring = remember(("pieces", length, pattern.window), lambda: Ring.alone(length, pattern.window, documents_BS))
    if dropout is not None and dropout.length is None:
        dropout = replace(dropout, length=length)
    return attend_to(q, k, v, sinks_n, None, Task(ring, pattern, documents_BS, dropout))[0]


def neighbourhoods(context: ContextGroup, together: int, length: int) -> tuple[tuple[TokenRun, ...], ...]:
    """The runs of each `together` neighbours, which have `length` tokens in all."""
    places = range(context.size // together)
    return tuple(context.runs_together(place * together, together, length // together) for place in places)


def ranges_of(documents_BS: Tensor | None, runs: Sequence[TokenRun]) -> dict[int, list[Range]]:
    """The lowest and the highest document of each run, by its first place, one pair per sample. {}: no documents."""
    if documents_BS is None:
        return {}
    if is_fake(documents_BS):  # a rehearsal: their values are unknown
        return {run.first: [(0, 1)] for run in runs}
    both = torch.stack([torch.stack(documents_BS[:, run.there].aminmax(dim=1), -1) for run in runs])
    return {run.first: [(low, high) for low, high in pairs] for run, pairs in zip(runs, both.cpu().tolist())}
