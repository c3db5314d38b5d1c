"""The rotary angles of a stream's tokens, made once for all layers that turn equally many channels in the same way."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.model.rotary import Rotary
from megatron.model.stream import Stream


def stream_angles(
    rotary: Rotary, channels: int, stream: Stream, begin: int, x_BSH: Tensor, ranks: int
) -> tuple[Tensor, Tensor]:
    """cos and sin as of `Rotary.angles`.

    Args:
        channels: of a head.
        begin: number of tokens read before.
        x_BSH: this rank's positions, with type and device of the queries.
        ranks: that share the sequence.
    """
    length = x_BSH.shape[1]

    def make() -> tuple[Tensor, Tensor]:
        positions = stream.positions
        if positions is None and (begin or stream.chunk is not None):
            positions = torch.arange(begin, begin + length, device=x_BSH.device).unsqueeze(0)
        whole = begin + length * ranks if stream.chunk is None else stream.chunk.whole
        return rotary.angles(whole, positions, x_BSH)

    return stream.remember(("rotary", rotary.name, channels, begin, length), make)
