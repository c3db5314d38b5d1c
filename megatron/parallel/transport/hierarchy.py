"""Collectives in levels: inside a host by its backend, and between hosts among the ranks at the same place of each.

On n hosts with l ranks each, an all-gather first gathers the blocks of the ranks at the same place of each host, then
these n blocks inside the host. A reduce-scatter is the reverse, and an all-reduce is one after the other. So a host
receives each block once, where a ring through all ranks passes all blocks through every host (PCCL, arXiv 2504.18658).
Between hosts the algorithm is the backend's, a ring, or recursive doubling and halving (Thakur et al. 2005,
"Optimization of collective communication operations in MPICH"), whose number of messages is logarithmic. An all-reduce
may also exchange whole parts with log n hosts in turn (NVRAR, arXiv 2511.09557): half the messages, for small sizes.

In three levels, a host is a pair of ranks with the fastest link. The ranks at the same place of each pair do the same
again among the real hosts, with the grid `outer`.

Shapes: n hosts, l ranks of a host, b elements of a block, n l ranks of a group."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.config.arithmetic.algorithm_table import DOUBLING, RECURSIVE, TWO_LEVEL

from ..layout.mesh import ALONE, Axis
from ..messages.account import LEVELS

INSIDE, BETWEEN, PAIR = LEVELS  # descriptions of the groups that are made
MakeGroup = Callable[..., dist.ProcessGroup | None]  # of ranks, and the keyword arguments of `new_group`
COMBINE: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}


def places_by_host(ranks: Sequence[int], hosts: Sequence[Hashable]) -> tuple[tuple[int, ...], ...] | None:
    """The places in a group of each host's ranks. None where hosts have different numbers of them.

    Args:
        ranks: of the group.
        hosts: of each rank of the job.
    """
    found: dict[Hashable, list[int]] = {}
    for place, rank in enumerate(ranks):
        found.setdefault(hosts[rank], []).append(place)
    if len({len(places) for places in found.values()}) > 1:
        return None
    return tuple(map(tuple, found.values()))


@dataclass(frozen=True)
class HostGrid:
    """A group from the place of this rank."""

    inside: Axis  # ranks of its host
    between: Axis  # the ranks at its place of every host.
    # [l n] the group's places, by place in a host and then by host. None where ranks are numbered host by host, so that
    # a transposition does.
    order: Tensor | None
    outer: "HostGrid | None" = None  # grid of the ranks of `between` with three levels, else None

    @classmethod
    def build(
        cls,
        ranks: Sequence[int],
        places: tuple[tuple[int, ...], ...],
        rank: int,
        make: MakeGroup,
        hosts: Sequence[Hashable] = (),
    ) -> "HostGrid":
        """Make the two groups. All ranks of the group call it, in the same order among other groups.

        Args:
            make: makes a group, or describes it by None.
            hosts: of each rank of the job, for three levels. `places` are then those in pairs.
        """
        at = next(host for host in places if rank in (ranks[place] for place in host))
        mine = [ranks[place] for place in at].index(rank)
        inside = _axis([ranks[place] for place in at], rank, make, PAIR if hosts else INSIDE)
        line = [ranks[host[mine]] for host in places]
        outer = None
        if hosts:
            further = places_by_host(line, hosts)
            assert further is not None, "pairs are within hosts, with equal numbers in each"
            outer = cls.build(line, further, rank, make)
            between = Axis(line.index(rank), len(line), None, tuple(line))
        else:
            between = _axis(line, rank, make, BETWEEN)
        flat = [place for host in places for place in host]
        order = torch.tensor([host[place] for place in range(len(at)) for host in places])
        return cls(inside, between, None if flat == list(range(len(ranks))) else order, outer)

    @property
    def axes(self) -> list[Axis]:
        """The groups that were made."""
        outer = self.outer.axes if self.outer else []
        return [axis for axis in (self.inside, self.between, *outer) if axis.group is not None]


def _axis(ranks: list[int], rank: int, make: MakeGroup, description: str) -> Axis:
    if len(ranks) == 1:
        return ALONE
    return Axis(ranks.index(rank), len(ranks), make(ranks, description=description), tuple(ranks))


def all_gather(out: Tensor, part: Tensor, grid: HostGrid, algorithm: str) -> None:
    """out [n l b] gets the blocks [b] of all ranks."""
    n, inner = grid.between.size, grid.inside.size
    column = part.new_empty(n * part.numel())
    _gather_between(column, part.reshape(-1), grid, algorithm)
    rows = column
    if inner > 1:
        rows = part.new_empty(inner * column.numel())
        dist.all_gather_into_tensor(rows, column, group=grid.inside.group)
    _from_rows(out, rows, grid, n, inner)


def reduce_scatter(part: Tensor, whole: Tensor, grid: HostGrid, algorithm: str, op: dist.ReduceOp.RedOpType) -> None:
    """part [b] gets this rank's block of the sum of all ranks' [n l b]."""
    n, inner = grid.between.size, grid.inside.size
    column = rows = _to_rows(whole, grid, n, inner)
    if inner > 1:
        column = rows.new_empty(n * part.numel())
        dist.reduce_scatter_tensor(column, rows, op=op, group=grid.inside.group)
    _reduce_between(part.view(-1), column, grid, algorithm, op)


def all_reduce(x: Tensor, grid: HostGrid, algorithm: str, op: dist.ReduceOp.RedOpType) -> None:
    """x becomes the sum over all ranks, in place. Parts are padded to equal sizes."""
    n, inner = grid.between.size, grid.inside.size
    parts = inner if algorithm in (TWO_LEVEL, DOUBLING) or grid.outer else inner * n
    flat = x.view(-1)
    size = -(-flat.numel() // parts) * parts
    work = flat if size == flat.numel() else torch.cat([flat, flat.new_zeros(size - flat.numel())])
    piece = work
    if inner > 1:
        piece = work.new_empty(size // inner)
        dist.reduce_scatter_tensor(piece, work, op=op, group=grid.inside.group)
    if grid.outer is not None:
        all_reduce(piece, grid.outer, algorithm, op)
    elif algorithm == TWO_LEVEL:
        dist.all_reduce(piece, op=op, group=grid.between.group)
    elif algorithm == DOUBLING:
        _sum_between(piece, grid.between, COMBINE[op])
    else:
        block = piece.new_empty(piece.numel() // n)
        _reduce_between(block, piece, grid, algorithm, op)
        _gather_between(piece, block, grid, algorithm)
    if inner > 1:
        dist.all_gather_into_tensor(work, piece, group=grid.inside.group)
    if work is not flat:
        flat.copy_(work[: flat.numel()])


def all_to_all(out: Tensor, whole: Tensor, grid: HostGrid) -> None:
    """out [n l b] gets the block for this rank from every rank's [n l b].

    A block goes to the receiver's place in the sender's host first, then between hosts, in one message for each host.
    """
    n, inner = grid.between.size, grid.inside.size
    rows = _to_rows(whole, grid, n, inner)  # [l n b], by receiver
    if inner > 1:
        got = torch.empty_like(rows)
        dist.all_to_all_single(got, rows, group=grid.inside.group)
        rows = got  # by the sender's place and the receiver's host
    column = rows.view(inner, n, -1).transpose(0, 1).contiguous()
    sent = torch.empty_like(column)
    if grid.outer is not None:
        all_to_all(sent.view(-1), column.view(-1), grid.outer)
    else:
        dist.all_to_all_single(sent.view(-1), column.view(-1), group=grid.between.group)
    _from_rows(out, sent.transpose(0, 1).contiguous().view(-1), grid, n, inner)


def _to_rows(whole: Tensor, grid: HostGrid, n: int, inner: int) -> Tensor:
    """[n l b] in the order of the group to [l n b]."""
    blocks = whole.reshape(n * inner, -1)
    if grid.order is None:
        return blocks.view(n, inner, -1).transpose(0, 1).contiguous().view(-1)
    return blocks[grid.order.to(whole.device)].view(-1)


def _from_rows(out: Tensor, rows: Tensor, grid: HostGrid, n: int, inner: int) -> None:
    """[l n b] to `out` in the order of the group."""
    if grid.order is None:
        out.view(n, inner, -1).copy_(rows.view(inner, n, -1).transpose(0, 1))
    else:
        out.view(n * inner, -1)[grid.order.to(out.device)] = rows.view(n * inner, -1)


def _gather_between(out: Tensor, part: Tensor, grid: HostGrid, algorithm: str) -> None:
    """[b] to [n b] among the ranks of `between`."""
    if grid.outer is not None:
        all_gather(out, part, grid.outer, algorithm)
        return
    axis = grid.between
    if algorithm == TWO_LEVEL:
        dist.all_gather_into_tensor(out, part.contiguous(), group=axis.group)
        return
    blocks, n, rank = out.view(axis.size, -1), axis.size, axis.rank
    blocks[rank].copy_(part)
    if algorithm == RECURSIVE:
        have = 1
        while have < n:
            first, theirs = rank // have * have, (rank ^ have) // have * have
            _swap(blocks[first : first + have], blocks[theirs : theirs + have], rank ^ have, rank ^ have, axis)
            have *= 2
        return
    for step in range(n - 1):
        _swap(blocks[(rank - step) % n], blocks[(rank - step - 1) % n], (rank + 1) % n, (rank - 1) % n, axis)


def _reduce_between(part: Tensor, whole: Tensor, grid: HostGrid, algorithm: str, op: dist.ReduceOp.RedOpType) -> None:
    """This rank's block [b] of the sum of [n b] over `between`. `whole` may be overwritten."""
    if grid.outer is not None:
        reduce_scatter(part, whole, grid.outer, algorithm, op)
        return
    axis = grid.between
    if algorithm == TWO_LEVEL:
        dist.reduce_scatter_tensor(part, whole, op=op, group=axis.group)
        return
    blocks, n, rank, combine = whole.clone().view(axis.size, -1), axis.size, axis.rank, COMBINE[op]
    if algorithm == RECURSIVE:
        have = n
        got = torch.empty_like(blocks[: n // 2])
        while have > 1:
            have //= 2
            mine, theirs = rank // have * have, (rank ^ have) // have * have
            _swap(blocks[theirs : theirs + have], got[:have], rank ^ have, rank ^ have, axis)
            own = blocks[mine : mine + have]
            # the lower rank's part first, so that both would add in the same order
            own.copy_(combine(own, got[:have]) if mine < theirs else combine(got[:have], own))
    else:
        got = torch.empty_like(blocks[0])
        for step in range(n - 1):
            _swap(blocks[(rank - step - 1) % n], got, (rank + 1) % n, (rank - 1) % n, axis)
            own = blocks[(rank - step - 2) % n]
            own.copy_(combine(got, own))
    part.copy_(blocks[rank])


def doubling(n: int, rank: int) -> list[tuple[int | None, int | None]]:
    """(to, from) of each message of a rank in the sum by recursive doubling over n hosts.

    The hosts beyond a power of two give their parts to others first, and get the sum at the end."""
    even = 1 << n.bit_length() - 1
    if rank >= even:
        return [(rank - even, None), (None, rank - even)]
    steps: list[tuple[int | None, int | None]] = [(rank ^ 1 << at,) * 2 for at in range(even.bit_length() - 1)]
    return [(None, rank + even), *steps, (rank + even, None)] if rank + even < n else steps


def _sum_between(part: Tensor, axis: Axis, combine: Callable[[Tensor, Tensor], Tensor]) -> None:
    """`part` becomes its sum over `between`, in place.

    Both ends of an exchange combine the same two numbers in one order, so all ranks have the same bits."""
    got, given = torch.empty_like(part), False
    for to, source in doubling(axis.size, axis.rank):
        _swap(part, got, to, source, axis)
        if source is not None:  # a maximum of 0 and -0 is the first of them
            first, second = (part, got) if axis.rank < source else (got, part)
            part.copy_(got if given else combine(first, second))
        given = source is None


def _swap(send: Tensor, receive: Tensor, to: int | None, source: int | None, axis: Axis) -> None:
    """Send to one rank of the axis while another one's message arrives."""
    ends = []
    if to is not None:
        ends.append(dist.P2POp(dist.isend, send, group=axis.group, group_peer=to))
    if source is not None:
        ends.append(dist.P2POp(dist.irecv, receive, group=axis.group, group_peer=source))
    for work in dist.batch_isend_irecv(ends):
        work.wait()
