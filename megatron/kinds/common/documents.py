"""Starts of recurrences at the documents of a sample."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megatron.model.stream import Stream
from megatron.parallel.layers.context import ContextGroup


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

    Their number depends on the data, so the host waits for the device: make it once for all layers.
    """
    places = torch.arange(starts_BS.shape[1], device=starts_BS.device)
    begins = (starts_BS == places).flatten().nonzero().flatten()
    return torch.cat([begins, begins.new_tensor([starts_BS.numel()])])


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
