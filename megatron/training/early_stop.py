"""Stopping within a slow step. A signal must not wait for 32 micro-batches on a CPU until the user loses patience.

Between micro-batches all ranks ask each other whether one of them has to stop, at most every few seconds. Faster
steps are not interrupted and cost nothing. The frequency is the same on all ranks: it follows from the exchanged
time of the step before.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from megatron.engine.protocol import StepDropped

from .exchange import STOPS

if TYPE_CHECKING:
    from .trainer import Trainer

EVERY = 5.0  # least seconds between two exchanges
SHARE_OF_GRACE = 0.25  # of the time between signal and kill, to finish a step. The rest is for saving


class Looks:
    """Called by the engine between the micro-batches of one step, at the same ones on all ranks.

    Args:
        pace: seconds of a step, equal on all ranks. None if unknown.
    """

    def __init__(self, trainer: Trainer, step: int, pace: float | None) -> None:
        self._trainer, self._step, self._pace = trainer, step, pace
        self._begin = time.monotonic()
        self._finishing = False

    def __call__(self, done: int, total: int) -> None:
        """`done` of `total` equal parts of the step's work are over.

        Raises:
            StepDropped: on all ranks, if one of them has to stop and the work done is less than the rest, or the
                rest takes too long.
        """
        looks = total - 1 if self._pace is None else min(total - 1, int(self._pace / EVERY))
        parts = looks + 1
        if self._finishing or parts * done // total == parts * (done - 1) // total:
            return
        self._trainer.ask(self._step)
        requests, elapsed = self._trainer.exchange.look(self._trainer.requests, time.monotonic() - self._begin)
        if not requests & set(STOPS):
            return
        left = elapsed * (total - done) / done
        if left <= elapsed and left <= SHARE_OF_GRACE * self._trainer.config.launch.grace:
            self._finishing = True
            return
        raise StepDropped(requests, done / total, left)
