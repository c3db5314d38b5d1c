"""A sequence in pieces: its documents, and runs of equal length side by side.

Shapes: B samples, S positions, c runs of Q positions."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from megatron.model.stream import Stream
from megatron.parallel.layers.context import ContextGroup

_bounds = WeakIdKeyDictionary()  # of starts that are in use


def document_starts(documents_BS: Tensor, continued_B: Tensor | None = None) -> Tensor:
    """Index of the first token of each token's document within this piece of the sequence, int64 [B, S].

    Args:
        documents_BS: number of each token's document. Tokens of one document are adjacent.
        continued_B: number of the document of the token before the piece. Where the piece continues it, the start lies
            before the piece: the index is below every tap's, -2**31.
    """
    places = torch.arange(documents_BS.shape[1], device=documents_BS.device).expand_as(documents_BS)
    new = torch.ones_like(documents_BS, dtype=torch.bool)
    new[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    starts = torch.where(new, places, 0).cummax(-1).values
    if continued_B is None:
        return starts
    return starts.masked_fill(documents_BS == continued_B.unsqueeze(-1), -(2**31))


def document_bounds(starts_BS: Tensor) -> Tensor:
    """Begins of documents in the concatenated samples, and the end, int64: `cu_seqlens` of kernels.

    Their number depends on the data, so the host waits for the device: once for all layers that have the same starts.
    """
    if starts_BS not in _bounds:
        places = torch.arange(starts_BS.shape[1], device=starts_BS.device)
        begins = (starts_BS == places).flatten().nonzero().flatten()
        _bounds[starts_BS] = torch.cat([begins, begins.new_full((1,), starts_BS.numel())])
    return _bounds[starts_BS]


class Continued(Protocol):
    """A mixer's state."""

    @property
    def document(self) -> Tensor | None:
        """int [B], the document of its last token, where there are documents."""


def shared_starts(stream: Stream, context: ContextGroup, state: Continued | None = None) -> Tensor | None:
    """`document_starts` of this rank's part of a sequence, or of a piece of one, that ranks share."""
    documents_BS = stream.documents
    if documents_BS is None:
        return None

    def make() -> Tensor:
        before_B1 = context.from_before(documents_BS[:, -1:])
        of_state = None if state is None else state.document
        return document_starts(documents_BS, before_B1.squeeze(1) if context.rank else of_state)

    return stream.remember("shared document starts", make)


def piece_starts(stream: Stream, state: Continued | None) -> Tensor | None:
    """`document_starts` of a stream, or of a piece of a sequence that continues from a mixer's state."""
    documents_BS = stream.documents
    if documents_BS is None:
        return None
    if state is not None:
        return document_starts(documents_BS, state.document)
    return stream.remember("document starts", lambda: document_starts(documents_BS))


@dataclass(frozen=True)
class Runs:
    """About sqrt(S) runs of about sqrt(S) positions. The last may be shorter and is padded."""

    length: int  # length, run: S and Q
    run: int
    filled: int  # positions that are missing in the last run.
    # Int [B, c, Q], index of the first token of each token's document. None where all is one document.
    starts: Tensor | None
    places: Tensor  # int [c, Q], index of each position

    @classmethod
    def of(cls, length: int, starts_BS: Tensor | None, device: torch.device) -> "Runs":
        run = max(1, math.isqrt(length))
        filled = -length % run
        places = torch.arange(length + filled, device=device).unflatten(0, (-1, run))
        starts = None
        if starts_BS is not None:
            starts = F.pad(starts_BS.double(), (0, filled), mode="replicate").long().unflatten(1, (-1, run))
        return cls(length, run, filled, starts, places)

    def cut(self, x_BS: Tensor) -> Tensor:
        """[B, S, ...] to [B, c, Q, ...], padded with 0."""
        return F.pad(x_BS, (0, 0) * (x_BS.dim() - 2) + (0, self.filled)).unflatten(1, (-1, self.run))

    def joined(self, x_BcQ: Tensor) -> Tensor:
        return x_BcQ.flatten(1, 2)[:, : self.length]

    def sees(self, distance: int) -> Tensor:
        """Whether a token sees the one `distance` before it in its run: bool [B or 1, c, Q]."""
        inside = (torch.arange(self.run, device=self.places.device) >= distance).expand_as(self.places).unsqueeze(0)
        return inside if self.starts is None else inside & (self.places - distance >= self.starts)

    @property
    def reads_state(self) -> Tensor | None:
        """Whether a token sees the state before its run: bool [B, c, Q]. None if all do."""
        return None if self.starts is None else self.starts < self.places[:, :1]

    @property
    def writes_state(self) -> Tensor:
        """Whether the state after its run has the values of a token: bool [B or 1, c, Q]."""
        real = (self.places < self.length).unsqueeze(0)
        return real if self.starts is None else real & (self.places >= self.starts[:, :, -1:])

    @property
    def keeps_state(self) -> Tensor | None:
        """Whether the state after a run depends on the state before it: bool [B, c]. None if all do."""
        return None if self.starts is None else self.starts[:, :, -1] < self.places[:, 0]


def earlier_in_run(x_BcQ: Tensor, distance: int) -> Tensor:
    """The values `distance` positions before, in the same run, else 0."""
    if distance == 0:
        return x_BcQ
    return F.pad(x_BcQ[:, :, :-distance], (0, 0) * (x_BcQ.dim() - 3) + (distance, 0))


def pieces(tensors: list[Tensor], chunk: int, starts_BS: Tensor | None) -> list[tuple[list[Tensor], Tensor | None]]:
    """The tensors [B, S, ...] in pieces of `chunk` positions, with each piece's starts relative to it."""
    if starts_BS is None:
        starts = [None] * -(-tensors[0].shape[1] // chunk)
    else:
        starts = [each - chunk * number for number, each in enumerate(starts_BS.split(chunk, 1))]
    # split and not slices: the gradient of a split is one concatenation
    return list(zip(map(list, zip(*(each.split(chunk, 1) for each in tensors))), starts))
