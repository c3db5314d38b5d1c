"""The experts that tokens used as the decoder read them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .schedule import Piece


def note_routes(pieces: Sequence[Piece], layers: Mapping[int, list[Tensor]]) -> None:
    """Keep the experts of each token of a pass, of one layer after another.

    Args:
        layers: what `recorded` has found in the pass. A layer reads all rows together at last. In the first pass of a
            decoder it has read a turn before, which showed that it keeps nothing of earlier tokens (`Turns.plain`).
    """
    tokens = sum(piece.end - piece.begin for piece in pieces)
    rows = iter(torch.cat([found[-1][:tokens] for found in layers.values()], 1).cpu())
    for piece in pieces:
        piece.live.drawn.routes.update(zip(range(piece.begin, piece.end), rows))
