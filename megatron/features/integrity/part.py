"""State at rest: from the end of an update to the next one nobody changes masters, moments and weights. So their hashes
must stay as they are, also of what no other rank holds. Where they do not, this rank's memory has changed by itself.

Hashes are compared where they are, so that nobody waits for a device: somebody asks later.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron.checkpoint.format.fragment import AVERAGE
from megatron.engine.part import EnginePart
from megatron.engine.replicas import Piece, PieceHashes, hash_bits

if TYPE_CHECKING:
    from megatron.engine.base import BaseEngine


class StateAtRest(EnginePart):
    """Hashes what this rank holds after an update, and again before the next.

    Attributes:
        pieces: what it holds; None until the engine has its state.
    """

    def __init__(self) -> None:
        self.pieces: PieceHashes | None = None
        self._source: tuple[list[Piece], Collection[int] | None] = [], None  # what is watched was chosen from this
        self._watched: list[Piece] = []
        self._before: Tensor | None = None  # while the state rests: hashes, int64 [watched]
        self._changed: Tensor | None = None  # bool [watched]

    def attach(self, engine: BaseEngine) -> None:
        self.pieces, engine.state.before_change = PieceHashes(engine.state), self.forget

    def before_update(self) -> None:
        if self._before is not None:
            self.look()
            self.forget()

    def begin(self, alone: Collection[int] | None = None) -> None:
        """The state rests from now on. While it does already, since an update was left out, it goes on doing so.

        Args:
            alone: codes of the pieces to watch; None for all.
        """
        if self._before is not None or self.pieces is None:
            return
        found = self.pieces.find()
        if found is not self._source[0] or alone is not self._source[1]:
            self._source, self._changed = (found, alone), None
            # The average of the weights moves on its own, after the update.
            still = [each for each in found if not each.name.endswith(f"({AVERAGE})")]
            self._watched = [each for each in still if alone is None or each.code in alone]
        self._before = _hashes(self._watched)

    def look(self) -> None:
        """Compare with how it was when the rest began."""
        if self._before is not None:
            changed = _hashes(self._watched) != self._before
            self._changed = changed if self._changed is None else self._changed | changed

    def forget(self) -> None:
        """The rest is over: somebody changes the state."""
        self._before = None

    def count(self, device: torch.device) -> Tensor:
        """int64, 0-d: how many pieces were found changed so far."""
        return torch.zeros((), dtype=torch.int64, device=device) if self._changed is None else self._changed.sum()

    def changed(self) -> list[str]:
        """Their names."""
        changed = [] if self._changed is None else self._changed.tolist()
        return sorted({each.name for each, bad in zip(self._watched, changed) if bad})


def _hashes(pieces: list[Piece]) -> Tensor:
    return torch.stack([hash_bits(each.values) for each in pieces]) if pieces else torch.zeros(0, dtype=torch.int64)
