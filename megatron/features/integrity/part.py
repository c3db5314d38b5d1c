"""State at rest: masters, moments and weights do not change between the end of an update and the next one, so their
hashes must not either. This includes state that only one rank holds. A change shows that this rank's memory is at
fault.

Hashes are compared on the device, and the result is read later, so that nothing waits for a device.
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
    """Hashes this rank's state after an update, and again before the next.

    Attributes:
        pieces: of the state. None until the engine has its state.
    """

    def __init__(self) -> None:
        self.pieces: PieceHashes | None = None
        self._source: tuple[list[Piece], Collection[int] | None] = [], None  # the watched pieces were chosen from this
        self._watched: list[Piece] = []
        self._before: Tensor | None = None  # while the state rests: hashes, int64 [watched]
        self._changed: Tensor | None = None  # bool [watched]

    def attach(self, engine: BaseEngine) -> None:
        self.pieces, engine.state.before_change = PieceHashes(engine.state), self.forget

    def before_update(self) -> None:
        if self._before is not None:
            self.look()
            self.forget()

    def begin(self, watched: Collection[int] | None = None) -> None:
        """The state rests from now on. If it does already, since an update was skipped, it continues to rest.

        Args:
            watched: codes of the pieces to watch. None: all.
        """
        if self._before is not None or self.pieces is None:
            return
        found = self.pieces.find()
        if found is not self._source[0] or watched is not self._source[1]:
            self._source, self._changed = (found, watched), None
            # The average of the weights moves on its own, after the update.
            still = [each for each in found if not each.name.endswith(f"({AVERAGE})")]
            self._watched = [each for each in still if watched is None or each.code in watched]
        self._before = _hashes(self._watched)

    def look(self) -> None:
        """Compare with the hashes at the beginning of the rest."""
        if self._before is not None:
            changed = _hashes(self._watched) != self._before
            self._changed = changed if self._changed is None else self._changed | changed

    def forget(self) -> None:
        """The rest is over: the state changes."""
        self._before = None

    def count(self, device: torch.device) -> Tensor:
        """int64, 0-d: number of pieces found changed so far."""
        return torch.zeros((), dtype=torch.int64, device=device) if self._changed is None else self._changed.sum()

    def changed(self) -> list[str]:
        changed = [] if self._changed is None else self._changed.tolist()
        return sorted({each.name for each, bad in zip(self._watched, changed) if bad})


def _hashes(pieces: list[Piece]) -> Tensor:
    return torch.stack([hash_bits(each.values) for each in pieces]) if pieces else torch.zeros(0, dtype=torch.int64)
