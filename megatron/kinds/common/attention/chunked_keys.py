"""Attention of a sequence that is worked on in chunks: the queries of one chunk, the keys of all up to it.

Keys and values of earlier chunks wait in the host's memory and come one chunk at a time, and so do the gradients that
later chunks have for them (FPDT, Yao et al. 2024). Chunks that a window or documents mask do not come. A chunk's part
of the gradient is computed before that of the chunk before it, so that each finds the terms of all later ones.

Shapes: as in `blocks`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import torch
from torch import Tensor

from megatron.model.offload import HostMemory
from megatron.model.stream import Chunk
from megatron.parallel.layers.context import TokenRun

from .pattern import Dropped, Pattern
from .ring import Masks, Range, Task, attend_to, masks_of, pieces_of, ranges_of


class Kept:
    """Keys, values and gradients of the chunks so far, for all chunks and for recomputation.

    Attributes:
        kv: keys and values of each chunk, in one tensor.
        gradients: their gradients of later chunks, at least fp32.
        runs: of each chunk's keys, several where some of them may be masked.
        ranges: of the documents of each run, by its first place.
        documents_BS: of all tokens so far.
    """

    def __init__(self) -> None:
        self.kv, self.gradients = HostMemory(), HostMemory()
        self.runs: list[tuple[TokenRun, ...]] = []
        self.ranges: dict[int, list[Range]] = {}
        self.documents_BS: Tensor | None = None

    def add(self, chunk: Chunk, k: Tensor, v: Tensor, documents_BS: Tensor | None, window: int | None) -> None:
        """Keep the chunk's keys and values, once."""
        if chunk.number < len(self.runs):
            return
        run = TokenRun(0, chunk.first, k.shape[2])
        cut = documents_BS is not None or window is not None
        self.runs.append(pieces_of(run, chunk.whole) if cut else (run,))
        if documents_BS is not None:
            before = self.documents_BS
            self.documents_BS = documents_BS if before is None else torch.cat([before, documents_BS], 1)
            self.ranges |= ranges_of(self.documents_BS, self.runs[-1])
        if not chunk.last:
            self.kv.put(chunk.number, torch.cat([k, v], -1))


@dataclass(frozen=True)
class ChunkSource:
    """Keys of a chunk's queries, in the place of a `Ring`.

    Attributes:
        place: the chunk's number.
        runs: of the keys of each chunk, and of the queries of this one.
    """

    kept: Kept
    place: int
    runs: Sequence[tuple[TokenRun, ...]]
    masks: Masks

    @classmethod
    def of(cls, kept: Kept, number: int, window: int | None) -> ChunkSource:
        runs = kept.runs[: number + 1]
        keys = [run for each in runs for run in each]
        return cls(kept, number, runs, masks_of(kept.runs[number], keys, window, kept.ranges))

    def keys(self, kv: Tensor) -> Iterator[tuple[int, Tensor | None]]:
        """Own keys, then keys of earlier chunks that are not all masked."""
        yield self.place, kv
        queries = self.runs[self.place]
        seen = [
            number
            for number in range(self.place)
            if any((q.first, k.first) in self.masks for q, k in product(queries, self.runs[number]))
        ]
        yield from self.kept.kv.each(seen)

    def home(self, own: Tensor) -> Terms:
        return Terms(self, own)


@dataclass
class Terms:
    """Gradients of keys and values, of this chunk and of earlier chunks, for which they wait."""

    chunks: ChunkSource
    own: Tensor

    def add(self, step: int, owner: int, more: Tensor | None) -> None:
        if more is None:
            return
        if owner == self.chunks.place:
            self.own = self.own + more
            return
        waiting = self.chunks.kept.gradients
        waiting.put(owner, waiting.pop(owner) + more if owner in waiting else more)

    def done(self) -> Tensor:
        waiting, place = self.chunks.kept.gradients, self.chunks.place
        return self.own + waiting.pop(place) if place in waiting else self.own


@dataclass
class ChunkedKeys:
    """State of a layer that attends, between the chunks of a sequence.

    Attributes:
        kept: shared by all chunks.
        length: tokens of the sequence so far.
        after: orders the gradients of the chunks (see `attend_to`).
    """

    kept: Kept = field(default_factory=Kept)
    length: int = 0
    after: Tensor | None = None

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        chunk: Chunk,
        pattern: Pattern,
        documents_BS: Tensor | None,
        dropout: Dropped | None,
        sinks_n: Tensor | None,
    ) -> Tensor:
        """Attention of a chunk's queries to its keys and the keys of earlier chunks. Arguments as in
        `attend`."""
        self.kept.add(chunk, k, v, documents_BS, pattern.window)
        self.length = chunk.first + chunk.tokens
        if dropout is not None:
            dropout = replace(dropout, length=chunk.whole)
        source = ChunkSource.of(self.kept, chunk.number, pattern.window)
        task = Task(source, pattern, None if documents_BS is None else self.kept.documents_BS, dropout)
        y, self.after = attend_to(q, k, v, sinks_n, self.after, task)
        return y
