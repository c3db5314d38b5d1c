"""Steps that are computed again, to check whether the machine repeats itself.

The first time the update is skipped, so the second one begins from the same weights, with the same batch and the
same draws. If two results differ in a bit, hardware has failed for a moment, or a kernel is not deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.data.batch import StepBatch
from megatron.engine.protocol import StepResult

from .gate import StepGate

if TYPE_CHECKING:
    from megatron.training.hook import Look
    from megatron.training.trainer import Trainer

SHOWN = 8  # ranks in a message


@dataclass(frozen=True)
class Fingerprint:
    """A step on this rank: the sum of its labels' losses, and hashes of the gradients that it computed, before they
    were summed, and of its optimizer's gradients.

    The first two do not depend on other ranks, except for ranks that compute a sample together.
    """

    loss: float
    own: int
    gradients: int


@dataclass(frozen=True)
class Disagreement:
    """Ranks whose fingerprints of two computations of a step differ, by part."""

    losses: list[int]
    own: list[int]
    gradients: list[int]

    def __bool__(self) -> bool:
        return bool(self.losses or self.own or self.gradients)

    @property
    def ranks(self) -> list[int]:
        """Ranks at fault, or some that one of them has misled: the others only received its results."""
        return self.losses or self.own or self.gradients

    @property
    def text(self) -> str:
        if self.losses:
            return f"{text_of(self.losses)} computed another loss"
        if self.own:
            return f"{text_of(self.own)} computed other gradients"
        return f"{text_of(self.gradients)} got other gradients"


class Replay:
    """Computes steps with a hash of their gradients."""

    def __init__(self, engine: Any, gate: StepGate) -> None:
        self._engine, self._gate = engine, gate

    def run(
        self, batch: StepBatch, lr: float, look: Look | None = None, trial: bool = False, own: bool = False
    ) -> StepResult:
        self.prepare(trial, own)
        return self._engine.step(batch, lr, look)

    def prepare(self, trial: bool = False, own: bool = False) -> None:
        """Hash the next step. With `own` also the gradients that this rank computes."""
        self._gate.prepare(trial=trial, own=self._engine.state.parameters if own else ())

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(float(self._engine.losses.loss), self._gate.own_gradients(), self._gate.gradients())

    def different(self, trainer: Trainer, first: Fingerprint) -> Disagreement:
        """Ranks whose fingerprint has changed."""
        now, ranks, own = self.fingerprint(), trainer.mesh.layout.world_size, trainer.mesh.rank
        flags = [0.0] * (3 * ranks)
        # A nan is equal to itself here.
        flags[own] = float(repr(now.loss) != repr(first.loss))
        flags[ranks + own] = float(now.own != first.own)
        flags[2 * ranks + own] = float(now.gradients != first.gradients)
        found = trainer.exchange.sum(list(flags)).tolist()
        return Disagreement(*([r for r in range(ranks) if found[part * ranks + r]] for part in range(3)))


def text_of(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:SHOWN])) + (" and others" if len(ranks) > SHOWN else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"
