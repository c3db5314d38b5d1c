"""The ranks that share each sample's tokens, as a layer sees them.

A layer that looks beyond a token asks this object for what other ranks have, and knows nothing else of the layout.
Which rank has which tokens is decided here alone: rank r of c has the r-th of c equal runs.

Shapes: B samples, S positions of the whole sequence, s = S / c positions of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import all_reduce, exchange, gather_sequence
from .mesh import ALONE, Axis, Mesh


@dataclass(frozen=True)
class Run:
    """Neighbouring tokens that a rank has: `length` of them, from place `begin` of its part, and `first` of the
    sequence on."""

    begin: int
    first: int
    length: int

    @property
    def stop(self) -> int:
        """The place in the sequence behind the last token."""
        return self.first + self.length


@dataclass(frozen=True)
class ContextGroup:
    """This rank's place among those that share a sequence, and how they exchange what they have of it.

    Attributes:
        axis: these ranks.
        method: how attention is to be computed, as `parallel.context_method` has it.
    """

    axis: Axis = ALONE
    method: str = "auto"

    @classmethod
    def of(cls, mesh: Mesh) -> ContextGroup:
        return cls(mesh.context, mesh.layout.context_method)

    @property
    def rank(self) -> int:
        return self.axis.rank

    @property
    def size(self) -> int:
        return self.axis.size

    def runs(self, length: int) -> tuple[Run, ...]:
        """The runs of neighbouring tokens of this rank, which has `length` tokens, in the order in which it has them.

        They are in the order of the sequence, too.
        """
        return (Run(0, self.rank * length, length),)

    def places(self, length: int, device: torch.device | str = "cpu") -> Tensor:
        """int64 [length], the place in the sequence of each of this rank's `length` tokens."""
        return torch.cat([torch.arange(run.first, run.stop, device=device) for run in self.runs(length)])

    def cut(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor with all positions of the sequence; no gradient flows between ranks."""
        if self.size == 1:
            return whole
        length, left = divmod(whole.shape[dim], self.size)
        if left:
            raise ValueError(f"{whole.shape[dim]} positions cannot be cut into {self.size} equal parts")
        parts = [whole.narrow(dim, run.first, run.length) for run in self.runs(length)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def gather(self, x_Bs: Tensor) -> Tensor:
        """[B, s, ...] of each rank to [B, S, ...] in the order of the sequence; the gradients of all ranks are summed,
        and each gets those of its tokens."""
        return x_Bs if self.size == 1 else gather_sequence(x_Bs, self.axis)

    def to_heads(self, x_BscX: Tensor) -> Tensor:
        """[B, s, c, X], of which the i-th along the third dimension is for rank i, to this rank's [B, S, X] of all
        tokens."""
        B, s, c, X = x_BscX.shape
        rows = x_BscX.permute(2, 0, 1, 3).reshape(c * B * s, X)
        rows = exchange(rows, [B * s] * c, [B * s] * c, self.axis)
        return rows.view(c, B, s, X).transpose(0, 1).reshape(B, c * s, X)

    def to_tokens(self, y_BSX: Tensor) -> Tensor:
        """The way back: [B, S, X] to what all ranks have for this rank's tokens, [B, s, c, X]."""
        (B, S, X), c = y_BSX.shape, self.size
        rows = y_BSX.view(B, c, S // c, X).transpose(0, 1).reshape(B * S, X)
        rows = exchange(rows, [B * S // c] * c, [B * S // c] * c, self.axis)
        return rows.view(c, B, S // c, X).permute(1, 2, 0, 3)

    def from_before(self, last_Bk: Tensor) -> Tensor:
        """What the rank before has given as `last_Bk`, its last k tokens [B, k, ...]; zeros on the first rank."""
        rows, k = last_Bk.flatten(0, 1), last_Bk.shape[:2].numel()
        sent = [k if rank == self.rank + 1 else 0 for rank in range(self.size)]
        received = [k if rank == self.rank - 1 else 0 for rank in range(self.size)]
        rows = exchange(rows[: sum(sent)], sent, received, self.axis)
        if self.rank == 0:  # of the exchanged rows too, so that all ranks take part in the backward pass
            rows = torch.cat([rows, rows.new_zeros((k, *rows.shape[1:]))])
        return rows.view_as(last_Bk)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks, not seen by autograd."""
        return x if self.size == 1 else all_reduce(x.clone(), self.axis)

    @torch.no_grad()
    def gather_numbers(self, x_Bs: Tensor) -> Tensor:
        """`gather` of integers."""
        if self.size == 1:
            return x_Bs
        parts = [torch.empty_like(x_Bs, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, x_Bs.contiguous(), group=self.axis.group)
        return torch.cat(parts, 1)
