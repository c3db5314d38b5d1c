"""Exchange of rows with the ranks of their experts, between `permute` and the experts' work, and back.

Expert parallel ranks have different experts, so rows go to the ranks of their experts in one all-to-all of uneven
parts, whose sizes are exchanged before. Tensor parallel ranks have the same tokens: each sends only its share of them
("duplicate token dropping", Singh et al. 2023, "A Hybrid Tensor-Expert-Data Parallelism Approach"), so that no row
crosses the expert axis twice. Where they have slices of the same experts, they gather the received rows. Where experts
are folded over them, they are expert parallel ranks like others, and gather nothing.

Shapes: T tokens, E experts, H hidden, R rows of this rank's tokens, N rows of this rank's experts. There are x expert
parallel ranks with n = E / x experts each, and t ranks that have slices of the same experts."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.kinds.moe.options import MoEOptions
from megatron.model.costs.exchanges import MEAN, MOST, NEVER, Around, LayerMessage
from megatron.model.costs.traffic import NotPredicted
from megatron.model.recompute import decide_once
from megatron.parallel.layers.collectives import exchange, gather_rows, scatter_rows
from megatron.parallel.layout.mesh import Mesh

from .permute import Rows, put, take


class LocalDispatch:
    """Every rank has all experts (or its slice of each): rows stay on it."""

    def send(self, rows_RH: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Any]:
        """Send rows [R, H], sorted by `rows`.

        Returns:
            The rows of this rank's experts, sorted by expert, their int32 ends [experts here], and an argument of
            `back`.
        """
        return rows_RH, rows.ends_E, None

    def back(self, y_NH: Tensor, sent: Any) -> Tensor:
        """The experts' results, in the order of the rows given to `send`."""
        return y_NH


@dataclass(frozen=True)
class Trip:
    """Numbers and places of exchanged rows."""

    rows: int  # number of rows of this rank's tokens
    own: Tensor | None  # int64, the rows that this rank sends. None if it sends all.
    sent: list[int]  # number of rows for each expert parallel rank
    received: list[int]  # number of rows from each
    room: int  # rows of each of the t ranks when they gather: their largest number of received rows
    place_N: Tensor  # int64, place of the n-th row of this rank's experts among all received rows
    ends_n: Tensor  # int32, ends of the rows of each of this rank's experts


class AllToAllDispatch:
    """Rows go to the expert parallel rank that has their expert. On the way back, the parts of ranks with slices are
    summed."""

    def __init__(self, mesh: Mesh):
        self.expert, self.tensor, self.slices = mesh.expert, mesh.tensor, mesh.expert_tensor

    def send(self, rows_RH: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Trip]:
        """As `LocalDispatch.send`. Within an expert, rows are ordered by data parallel rank, then by token."""
        trip = decide_once(lambda: self._plan(rows))
        x_RH = rows_RH if trip.own is None else take(rows_RH, trip.own)
        x_RH = exchange(x_RH, trip.sent, trip.received, self.expert)
        if self.slices.size > 1:
            x_RH = gather_rows(F.pad(x_RH, (0, 0, 0, trip.room - len(x_RH))), self.slices)
        return take(x_RH, trip.place_N), trip.ends_n, trip

    def back(self, y_NH: Tensor, trip: Trip) -> Tensor:
        """The experts' results, summed over the ranks with slices, in the order of the rows given to `send`. 0 where
        another tensor parallel rank has sent the row."""
        y_RH = put(y_NH, trip.place_N, self.slices.size * trip.room)
        if self.slices.size > 1:
            y_RH = scatter_rows(y_RH, self.slices)[: sum(trip.received)]
        y_RH = exchange(y_RH, trip.received, trip.sent, self.expert)
        return y_RH if trip.own is None else put(y_RH, trip.own, trip.rows)

    @torch.no_grad()
    def _plan(self, rows: Rows) -> Trip:
        own, ends_E = self._share(rows)
        x, E = self.expert.size, len(ends_E)
        if own is None and rows.each is not None:  # as on the other ranks, whose number of tokens is the same
            from_txn, part = ends_E.new_full((1, x, E // x), rows.each), rows.each * (E // x)
            sizes = [part] * (2 * x) + [part * x]
        else:
            from_txn, sizes = self._counted(ends_E, len(rows.source_R))
        sent, received, arrived = sizes[:x], sizes[x : 2 * x], sizes[2 * x :]
        own, room = None if own is None else own[: sum(sent)], max(arrived)
        ends_n = from_txn.sum((0, 1)).cumsum(0).int()
        return Trip(len(rows.source_R), own, sent, received, room, _places(from_txn, room, sum(arrived)), ends_n)

    def _counted(self, ends_E: Tensor, rows: int) -> tuple[Tensor, list[int]]:
        """Exchange the number of rows of each expert. Only here the host waits for the device."""
        sent_xn = ends_E.diff(prepend=ends_E.new_zeros(1)).view(self.expert.size, -1)
        from_xn = sent_xn
        if self.expert.size > 1:
            from_xn = torch.empty_like(sent_xn)
            dist.all_to_all_single(from_xn, sent_xn, group=self.expert.group)
        from_txn = from_xn.unsqueeze(0)
        if self.slices.size > 1:
            everyone = from_xn.new_empty((self.slices.size * self.expert.size, from_xn.shape[1]))
            dist.all_gather_into_tensor(everyone, from_xn, group=self.slices.group)
            from_txn = everyone.view(-1, *from_xn.shape)
        counts = torch.cat([sent_xn.sum(1), from_xn.sum(1), from_txn.sum((1, 2))])
        return from_txn, self._even(rows) if hasattr(counts, "fake_mode") else counts.tolist()

    def _even(self, rows: int) -> list[int]:
        """The sizes of `_counted` in a rehearsal, where tensors have no values: every expert gets the same number of
        rows."""
        own, x = rows // self.tensor.size, self.expert.size
        sent = [own // x + (place < own % x) for place in range(x)]
        return [*sent, *sent, *([own] * self.slices.size)]

    def _share(self, rows: Rows) -> tuple[Tensor | None, Tensor]:
        """All rows, this rank's tensor parallel share of the tokens first, and the ends of the share [E]."""
        ends_E = rows.ends_E.long()
        if self.tensor.size == 1:
            return None, ends_E
        if rows.owner_T is None:
            mine_R = rows.source_R * self.tensor.size // rows.tokens == self.tensor.rank
        else:
            mine_R = rows.owner_T[rows.source_R] % self.tensor.size == self.tensor.rank
        count_R = F.pad(mine_R.cumsum(0), (1, 0))
        return mine_R.logical_not().byte().argsort(stable=True), count_R[ends_E]


def _places(from_txn: Tensor, room: int, total: int) -> Tensor:
    """Places of the rows of this rank's experts among the received rows, sorted by expert, then by origin.

    Received rows are sorted by rank of the slices (`room` rows each), expert parallel rank and expert."""
    t, x, n = from_txn.shape
    begin_txn = (from_txn.flatten(1).cumsum(1) - from_txn.flatten(1)).view(t, x, n)
    begin_txn = begin_txn + room * torch.arange(t, device=from_txn.device).view(t, 1, 1)
    length_S, begin_S = from_txn.permute(2, 1, 0).flatten(), begin_txn.permute(2, 1, 0).flatten()
    shift_S = begin_S - (length_S.cumsum(0) - length_S)
    return torch.arange(total, device=from_txn.device) + shift_S.repeat_interleave(length_S, output_size=total)


def dispatch_messages(hidden_size: int, options: MoEOptions, around: Around) -> list[LayerMessage]:
    """Messages of a layer for its experts.

    The number of received rows counts as that of sent rows, which holds over all ranks of the group. Ranks with slices
    of the same experts gather the largest number of rows that one of them can get.

    Raises:
        NotPredicted: how many rows go out depends on the data.
    """
    mesh = around.mesh
    if not mesh.layout.sends_tokens:
        return []
    if options.capacity_factor is not None or options.router.select == "expert_choice":
        raise NotPredicted("there is no formula for spread experts with a capacity (the tokens decide what is dropped)")
    tokens = around.samples * around.length
    shares = [sum(token * around.tensor // tokens == rank for token in range(tokens)) for rank in range(around.tensor)]
    found, x, slices = list[LayerMessage](), mesh.expert.size, mesh.expert_tensor.size
    if x > 1:
        rows = shares[mesh.tensor.rank] * options.top_k * hidden_size
        found = [LayerMessage("expert", "all_to_all", rows, backward=back, by_data=balanced, split=True)
                 for back in (False, True) for balanced in ("", MEAN)]  # fmt: skip
        found.append(LayerMessage("expert", "all_to_all", options.experts, "int64", again=NEVER))
    if slices > 1:
        room = x * max(shares) * min(options.top_k, options.experts // x)
        found.append(LayerMessage("tensor", "all_gather", slices * options.experts, "int64", again=NEVER))
        found += [LayerMessage("tensor", operation, slices * room * hidden_size, backward=back, by_data=MOST)
                  for operation in ("all_gather", "reduce_scatter") for back in (False, True)]  # fmt: skip
    return found


def row_messages(options: MoEOptions, around: Around) -> list[LayerMessage]:
    """Sums over columns of the experts' rows: after their first matrices, and of the gradient before their second.

    Raises:
        NotPredicted: how many rows there are depends on the data, also without spread experts.
    """
    mesh = around.mesh
    if mesh.columns.size == 1:
        return []
    if options.capacity_factor is not None or options.router.select == "expert_choice":
        raise NotPredicted("there is no formula for experts with a capacity and columns (the tokens decide the rows)")
    rows, spread = around.samples * around.length * options.top_k, mesh.layout.sends_tokens
    width = (options.hidden_size or 0) // mesh.expert_tensor.size
    found = [LayerMessage("columns", "all_reduce", rows * (2 if options.gated else 1) * width)]
    found.append(LayerMessage("columns", "all_reduce", rows * width, backward=True))
    return [replace(each, by_data=MEAN) for each in found] if spread else found
