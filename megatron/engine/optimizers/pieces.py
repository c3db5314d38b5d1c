"""Whole matrices from the flat pieces that ZeRO 1 and 2 leave on each data parallel rank.

ZeRO lays the parameters of a group end to end, cuts the line into equal parts, one per rank, and writes on each
parameter which of its elements the rank owns. Most matrices lie whole on one rank; those on a cut are exchanged in
one all-to-all, in which each rank that owns part of a matrix receives the other parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True)
class OwnedPiece:
    """Elements [start, start + count) of a flattened parameter, at `place` of its owner's flat tensor."""

    start: int
    count: int
    place: int


def owned_piece(parameter: nn.Parameter) -> OwnedPiece:
    """What this rank owns of a parameter, as DeepSpeed's ZeRO 1, ZeRO 2 and BF16 optimizers mark it."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return OwnedPiece(0, 0, 0)
    low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
    return OwnedPiece(low.start, low.numel, high.start)


@dataclass(frozen=True)
class Pieces:
    """The pieces of a group's matrices on every rank of a data parallel group."""

    parameters: list[nn.Parameter]
    table: list[list[OwnedPiece]]  # [rank][parameter]
    rank: int
    group: Any

    @classmethod
    def of(cls, parameters: list[nn.Parameter]) -> Pieces:
        """Collect every rank's pieces; all ranks of the data parallel group call it together."""
        mine, group = [owned_piece(parameter) for parameter in parameters], parameters[0]._dp_group
        local = torch.tensor([[p.start, p.count, p.place] for p in mine], device=parameters[0].device)
        everyone = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, local, group=group)
        table = [[OwnedPiece(*row) for row in rows.tolist()] for rows in everyone]
        return cls(parameters, table, dist.get_rank(group), group)

    @cached_property
    def owners(self) -> list[list[tuple[int, OwnedPiece]]]:
        """For each parameter, the ranks that own some of it and their pieces."""
        return [
            [(rank, row[index]) for rank, row in enumerate(self.table) if row[index].count]
            for index in range(len(self.parameters))
        ]

    @cached_property
    def shared(self) -> list[tuple[OwnedPiece, list[tuple[int, OwnedPiece]]]]:
        """Of the parameters that this rank owns a part of: its piece, and the other owners with theirs."""
        rows = []
        for owners in self.owners:
            mine = [piece for rank, piece in owners if rank == self.rank]
            if mine and len(owners) > 1:
                rows.append((mine[0], [(rank, piece) for rank, piece in owners if rank != self.rank]))
        return rows

    def whole(self, flat: torch.Tensor) -> Iterator[tuple[nn.Parameter, torch.Tensor, OwnedPiece]]:
        """The matrices of which this rank owns something, made whole from every rank's `flat` tensor.

        Yields:
            the parameter, its matrix of `flat`'s values, and this rank's piece of it.
        """
        received = self._exchange(flat)
        for parameter, owners in zip(self.parameters, self.owners):
            mine = [piece for rank, piece in owners if rank == self.rank]
            if not mine:
                continue
            matrix = flat.new_empty(parameter.numel())
            for rank, piece in owners:
                values = flat[piece.place : piece.place + piece.count] if rank == self.rank else received[rank].pop(0)
                matrix[piece.start : piece.start + piece.count] = values
            yield parameter, matrix.view(parameter.shape), mine[0]

    def _exchange(self, flat: torch.Tensor) -> list[list[torch.Tensor]]:
        """Send this rank's pieces of cut matrices to their other owners; returns, per rank, what came from it."""
        ranks = len(self.table)
        if all(len(owners) < 2 for owners in self.owners):
            return [[] for _ in range(ranks)]
        outgoing: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
        incoming: list[list[int]] = [[] for _ in range(ranks)]
        for mine, others in self.shared:
            for rank, piece in others:
                outgoing[rank].append(flat[mine.place : mine.place + mine.count])
                incoming[rank].append(piece.count)
        receive = flat.new_empty(sum(map(sum, incoming)))
        dist.all_to_all_single(
            receive,
            torch.cat([flat.new_empty(0), *(part for row in outgoing for part in row)]),
            group=self.group,
            output_split_sizes=list(map(sum, incoming)),
            input_split_sizes=[sum(map(len, row)) for row in outgoing],
        )
        parts = iter(receive.split([count for row in incoming for count in row]))
        return [[next(parts) for _ in row] for row in incoming]
