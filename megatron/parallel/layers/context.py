"""The ranks that share each sample's tokens, as a layer sees them.

A layer that reads more than one token gets the tokens of other ranks by this object, and knows nothing else of the
layout. Only this module decides which rank has which tokens. In a contiguous cut, rank r of c has the r-th of c equal
runs. In a zigzag cut it has the r-th run and the r-th from the end of 2 c, so that causal attention is the same work
for all. In a sequence that layers compute in chunks, it has the r-th run of every chunk.

Shapes: B samples, S positions of the whole sequence, s = S / c positions of this rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from ..layout.mesh import ALONE, Axis, Mesh
from .collectives import all_reduce, exchange, gather_sequence, swap


@dataclass(frozen=True)
class TokenRun:
    """`length` neighbouring tokens of a rank, from place `begin` of its part and place `first` of the sequence on."""

    begin: int
    first: int
    length: int

    @property
    def stop(self) -> int:
        """The place in the sequence after the last token."""
        return self.first + self.length

    @property
    def here(self) -> slice:
        """Places of the tokens in the part."""
        return slice(self.begin, self.begin + self.length)

    @property
    def there(self) -> slice:
        """Places of the tokens in the sequence."""
        return slice(self.first, self.stop)


@lru_cache(maxsize=64)
def _runs(cut: str, rank: int, ranks: int, length: int, chunk: int) -> tuple[TokenRun, ...]:
    if chunk:
        whole = range(0, length * ranks, chunk)
        sizes = [min(chunk, length * ranks - first) // ranks for first in whole]
        begins = [first // ranks for first in whole]
        return tuple(TokenRun(at, first + rank * size, size) for at, first, size in zip(begins, whole, sizes))
    if cut == "contiguous":
        return (TokenRun(0, rank * length, length),)
    half = length // 2
    if length % 2:
        raise ValueError(f"{length} tokens of a rank cannot be cut into two equal runs")
    return TokenRun(0, rank * half, half), TokenRun(half, (2 * ranks - 1 - rank) * half, half)


@lru_cache(maxsize=64)
def _joined(
    cut: str, first: int, count: int, ranks: int, length: int, chunk: int
) -> tuple[tuple[TokenRun, ...], tuple[TokenRun, ...]]:
    """The runs of neighbouring ranks in the order of the sequence, as each rank has them, and with adjacent runs
    merged."""
    pieces = [
        TokenRun(place * length + run.begin, run.first, run.length)
        for place in range(count)
        for run in _runs(cut, first + place, ranks, length, chunk)
    ]
    pieces.sort(key=lambda run: run.first)
    merged: list[TokenRun] = []
    for piece in pieces:
        if merged and merged[-1].stop == piece.first:
            last = merged.pop()
            merged.append(TokenRun(last.begin, last.first, last.length + piece.length))
        else:
            begin = merged[-1].begin + merged[-1].length if merged else 0
            merged.append(TokenRun(begin, piece.first, piece.length))
    return tuple(pieces), tuple(merged)


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share a sequence, and their exchanges.

    Attributes:
        axis: the ranks.
        method: `parallel.context_method`.
        together: number of neighbours that exchange heads in nested attention. None: it follows from the heads.
        zigzag: whether the cut is zigzag.
        chunk: tokens of a chunk on all ranks. 0 where there are no chunks, and for layers, which have one chunk at a
            time.
    """

    axis: Axis = ALONE
    method: str = "auto"
    together: int | None = None
    zigzag: bool = False
    chunk: int = 0

    @classmethod
    def of(cls, mesh: Mesh, chunk: int = 0) -> "ContextGroup":
        layout = mesh.layout
        return cls(mesh.context, layout.context_method, layout.context_ulysses, layout.zigzag, chunk)

    @property
    def rank(self) -> int:
        return self.axis.rank

    @property
    def size(self) -> int:
        return self.axis.size

    @property
    def cut_name(self) -> str:
        return "zigzag" if self.zigzag and self.size > 1 else "contiguous"

    def runs(self, length: int) -> tuple[TokenRun, ...]:
        """The runs of this rank's `length` tokens, in the order of the sequence."""
        return _runs(self.cut_name, self.rank, self.size, length, self.chunk if self.size > 1 else 0)

    def runs_together(self, first: int, count: int, length: int) -> tuple[TokenRun, ...]:
        """The runs of ranks `first` to `first + count - 1`, with `length` tokens each, in the order of the sequence.

        `begin` counts the tokens of all of them.
        """
        return _joined(self.cut_name, first, count, self.size, length, self.chunk)[1]

    def places(self, length: int, device: torch.device | str = "cpu") -> Tensor:
        """int64 [length], the place in the sequence of each of this rank's `length` tokens."""
        return torch.cat([torch.arange(run.first, run.stop, device=device) for run in self.runs(length)])

    def cut(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor with all positions of the sequence. No gradient flows between ranks."""
        if self.size == 1:
            return whole
        length, left = divmod(whole.shape[dim], self.size)
        if left:
            raise ValueError(f"{whole.shape[dim]} positions cannot be cut into {self.size} equal parts")
        parts = [whole.narrow(dim, run.first, run.length) for run in self.runs(length)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def gather(self, x_Bs: Tensor) -> Tensor:
        """[B, s, ...] of each rank to [B, S, ...] in the order of the sequence. Gradients of all ranks are summed."""
        return x_Bs if self.size == 1 else self._ordered(gather_sequence(x_Bs, self.axis), 0, self.size)

    def to_heads(self, x_BsuX: Tensor, together: int) -> Tensor:
        """[B, s, u, X] to this rank's [B, u s, X] of the tokens of u neighbours, in the order of the sequence.

        Args:
            x_BsuX: index i of the third dimension is for the i-th neighbour.
            together: u, number of neighbours. It divides the number of ranks.
        """
        B, s, u, X = x_BsuX.shape
        rows, counts = x_BsuX.permute(2, 0, 1, 3).reshape(u * B * s, X), self._neighbours(together, B * s)
        rows = exchange(rows, counts, counts, self.axis)
        y = rows.view(u, B, s, X).transpose(0, 1).reshape(B, u * s, X)
        return self._ordered(y, self.rank // u * u, u)

    def to_tokens(self, y_BTX: Tensor, together: int) -> Tensor:
        """The reverse of `to_heads`: [B, u s, X] to the values of all neighbours for this rank's tokens, [B, s, u,
        X]."""
        (B, T, X), u = y_BTX.shape, together
        y_BTX = self._ordered(y_BTX, self.rank // u * u, u, back=True)
        rows = y_BTX.view(B, u, T // u, X).transpose(0, 1).reshape(B * T, X)
        counts = self._neighbours(u, B * T // u)
        rows = exchange(rows, counts, counts, self.axis)
        return rows.view(u, B, T // u, X).permute(1, 2, 0, 3)

    def _neighbours(self, together: int, rows: int) -> list[int]:
        """`rows` for each rank of the same neighbourhood, 0 for others."""
        return [rows if rank // together == self.rank // together else 0 for rank in range(self.size)]

    def _ordered(self, x_BT: Tensor, first: int, count: int, back: bool = False) -> Tensor:
        """The tokens of `count` ranks, in rank order, to the order of the sequence, or `back`."""
        if self.cut_name == "contiguous" and not self.chunk:
            return x_BT
        pieces, _ = _joined(self.cut_name, first, count, self.size, x_BT.shape[1] // count, self.chunk)
        if back:
            begins = [0]
            for piece in pieces:
                begins.append(begins[-1] + piece.length)
            order = sorted(range(len(pieces)), key=lambda at: pieces[at].begin)
            return torch.cat([x_BT[:, begins[at] : begins[at + 1]] for at in order], 1)
        return torch.cat([x_BT[:, piece.here] for piece in pieces], 1)

    def from_before(self, x: Tensor, by: int = 1) -> Tensor:
        """The `x` of the rank `by` ranks before, of one shape on all ranks. Zeros where there is none."""
        if self.zigzag:
            raise ValueError("in a zigzag cut, a rank's tokens do not follow the tokens of the rank before")
        return self._passed(x, self.rank + by, self.rank - by)

    def to_first(self, x: Tensor) -> Tensor:
        """The last rank's `x` on the first rank, zeros on others. All have one shape, and gradients."""
        if self.size == 1:
            return x
        last = self.size - 1
        return self._passed(x, 0 if self.rank == last else -1, -1 if self.rank else last)

    def _passed(self, x: Tensor, target: int, source: int) -> Tensor:
        """The `x` of a rank, after sending the own one to another. Zeros where there is no such source."""
        sent, received = ([int(rank == other) for rank in range(self.size)] for other in (target, source))
        rows = exchange(x.reshape(1, -1)[: sum(sent)], sent, received, self.axis)
        if not any(received):  # after the exchange, so that all ranks take part in the backward pass
            rows = torch.cat([rows, x.new_zeros((1, x.numel()))])
        return rows.view(x.shape)

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
        return self._ordered(torch.cat(parts, 1), 0, self.size)

    def swap(self, sent: Sequence[tuple[int, Tensor]], received: Sequence[tuple[int, Tensor]]) -> list[dist.Work]:
        """`swap` with the places of ranks on the axis."""
        here = self.rank
        return swap(self.axis, [(to - here, x) for to, x in sent], [(source - here, x) for source, x in received])
