"""Attention of a sequence that is worked on in chunks: the queries of one chunk, the keys of all up to it.

Keys and values of earlier chunks wait in the host's memory and come one chunk at a time (FPDT, Yao et al. 2024). So do
the gradients that later chunks have for them. Chunks that a window or documents mask do not come. A chunk's part
of the gradient is computed before that of the chunk before it, so that each finds the terms of all later ones.

Shapes: as in `blocks`.

Tensors that wait in the host's memory between uses.

On a GPU a stream of their own copies them out and back, the next one while one is used. On a CPU the same calls copy
nothing, since its memory is the host's."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from megatron.model.stream import Chunk
from megatron.parallel.layers.context import TokenRun

from .pattern import Dropped, Pattern
from .ring import Masks, Range, Task, attend_to, masks_of, pieces_of, ranges_of


@lru_cache(maxsize=8)
def _copies(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@dataclass
class _Parked:
    held: Tensor
    device: torch.device
    written: torch.cuda.Event | None = None


class HostMemory:
    """Tensors by number, on the host."""

    def __init__(self) -> None:
        self._parked: dict[int, _Parked] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._parked

    def put(self, number: int, tensor: Tensor) -> None:
        """Keep the tensor in place of an earlier one. Its memory may be used again at once."""
        tensor = tensor.detach()
        if tensor.device.type != "cuda" or is_fake(tensor):  # no copies through a stream of their own
            self._parked[number] = _Parked(tensor.to("cpu"), tensor.device)
            return
        stream = _copies(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            held.copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)
            self._parked[number] = _Parked(held, tensor.device, stream.record_event())

    def pop(self, number: int) -> Tensor:
        """The tensor on its device, and no longer here."""
        (found,) = (each for _, each in self.each([number]))
        del self._parked[number]
        return found

    def each(self, numbers: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """The tensors of these numbers, on their device. The next one is copied while one is used."""
        coming = self._fetch(numbers[0]) if numbers else None
        for place, number in enumerate(numbers):
            assert coming is not None
            here, ready = coming
            coming = self._fetch(numbers[place + 1]) if place + 1 < len(numbers) else None
            if ready is not None:
                torch.cuda.current_stream(here.device).wait_event(ready)
                here.record_stream(torch.cuda.current_stream(here.device))
            yield number, here

    def _fetch(self, number: int) -> tuple[Tensor, torch.cuda.Event | None]:
        parked = self._parked[number]
        if parked.written is None:
            return parked.held.to(parked.device), None
        stream = _copies(parked.device)
        with torch.cuda.stream(stream):
            stream.wait_event(parked.written)
            here = parked.held.to(parked.device, non_blocking=True)
            return here, stream.record_event()


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
    """Keys of a chunk's queries, in the place of a `Ring`."""

    kept: Kept
    place: int  # the chunk's number
    runs: Sequence[tuple[TokenRun, ...]]  # of the keys of each chunk, and of the queries of this one
    masks: Masks

    @classmethod
    def of(cls, kept: Kept, number: int, window: int | None) -> "ChunkSource":
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

    def home(self, own: Tensor) -> "Terms":
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
    """State of a layer that attends, between the chunks of a sequence."""

    kept: Kept = field(default_factory=Kept)  # shared by all chunks
    length: int = 0  # tokens of the sequence so far
    after: Tensor | None = None  # orders the gradients of the chunks (see `attend_to`)

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
        """Attention of a chunk's queries to its keys and the keys of earlier chunks. Arguments as in `attend`."""
        self.kept.add(chunk, k, v, documents_BS, pattern.window)
        self.length = chunk.first + chunk.tokens
        if dropout is not None:
            dropout = replace(dropout, length=chunk.whole)
        source = ChunkSource.of(self.kept, chunk.number, pattern.window)
        task = Task(source, pattern, None if documents_BS is None else self.kept.documents_BS, dropout)
        y, self.after = attend_to(q, k, v, sinks_n, self.after, task)
        return y
