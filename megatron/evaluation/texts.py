"""Texts whose last tokens are scored."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PAD = 0  # the id behind the end of a text; no result depends on it
Row = tuple[int, ...]


@dataclass(frozen=True)
class Text:
    """A text whose last `scored` tokens are predicted, each from all that stands before it.

    Raises:
        ValueError: no token is scored, or nothing stands before the first one that is.
    """

    tokens: Row
    scored: int

    def __post_init__(self) -> None:
        if not 0 < self.scored < len(self.tokens):
            raise ValueError(f"{self.scored} of {len(self.tokens)} tokens cannot be scored: one must stand before them")

    @property
    def inputs(self) -> Row:
        """What the model reads."""
        return self.tokens[:-1]

    @property
    def targets(self) -> Row:
        """The scored tokens. The first of them is predicted at position `len(inputs) - scored`."""
        return self.tokens[-self.scored :]


def states_at(x_BSH: Tensor, rows: list[int], places: list[int]) -> Tensor:
    """[N, H], the states at these places of these rows."""
    return x_BSH[torch.tensor(rows, dtype=torch.int64), torch.tensor(places, dtype=torch.int64)]
