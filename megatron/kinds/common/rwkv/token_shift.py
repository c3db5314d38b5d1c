"""The token shift of RWKV: each token and the one before it, mixed channel by channel.

Shapes: B samples, S positions, H hidden, m mixes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.kinds.common.recurrence.recomputed import recomputed
from megatron.kinds.common.recurrence.sequence_scan import last_document
from megatron.model.stream import Stream
from megatron.parallel.layers.context import ContextGroup


@dataclass
class ShiftState:
    """State between pieces of a sequence. Gradients may flow through it.

    Attributes:
        last: the last token, [B, 1, H].
        document: int [B], its document, where there are documents.
    """

    last: Tensor | None = None
    document: Tensor | None = None

    def keep(self, context: ContextGroup, x_BSH: Tensor, stream: Stream) -> None:
        self.last = context.to_first(x_BSH[:, -1:])
        self.document = last_document(context, stream)


def shifted(x_BSH: Tensor, last_B1H: Tensor | None = None, starts_BS: Tensor | None = None) -> Tensor:
    """The token before each: `last` (or 0) before the first, 0 before the first of a document (`document_starts`)."""
    first = torch.zeros_like(x_BSH[:, :1]) if last_B1H is None else last_B1H.to(x_BSH.dtype)
    past = torch.cat([first, x_BSH[:, :-1]], 1)
    if starts_BS is None:
        return past
    places = torch.arange(x_BSH.shape[1], device=x_BSH.device)
    return past * (places > starts_BS).unsqueeze(-1)


Blend = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], tuple[Tensor, ...]]


def blended(x: Tensor, mix_mH: Tensor, last: Tensor | None, starts: Tensor | None) -> tuple[Tensor, ...]:
    """x + mix * (shift(x) - x) for each of m mixes, [B, S, H] each."""
    difference = shifted(x, last, starts) - x
    return tuple(torch.addcmul(x, difference, mix.to(x.dtype)) for mix in mix_mH)


def mixed(
    x_BSH: Tensor, mix_mH: Tensor, last_B1H: Tensor | None, starts_BS: Tensor | None, blend: Blend = blended
) -> tuple[Tensor, ...]:
    """`blended`, or its compiled form. Only the inputs are kept for the gradient."""
    return recomputed(blend, x_BSH, mix_mH, last_B1H, starts_BS)
