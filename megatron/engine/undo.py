"""What a step changes besides the tensors that checkpoints have: one list, for whatever undoes a step.

An update that is skipped, or computed as a trial (audits, the noise scale), leaves all of it as it was before the step.
A run that returns to a checkpoint sets all of it, to values of the checkpoint or else to those of a new run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .part import EnginePart
from .parts import COMPRESSION
from .state import EngineState

if TYPE_CHECKING:
    from megatron.parallel.transport.compression import CompressedSum

OPTIMIZER, SCALER = "optimizer", "loss_scaler"


class Undo:
    """The optimizer's counts, the loss scaler of fp16, the error feedback of gradients, and what parts of the engine
    keep, as that which judges spikes does.

    Weights, optimizer states, routers' corrections and the average of the weights are tensors of checkpoints
    (`EngineState.targets`); a step without an update does not touch them.

    Args:
        parts: of the engine, attached.
    """

    def __init__(self, state: EngineState, parts: Mapping[str, EnginePart]) -> None:
        self._state, self._parts = state, parts
        compression: Any = parts.get(COMPRESSION)
        self._feedback: CompressedSum | None = compression and compression.sums
        self._scaler: Mapping[str, Any] | None = None  # before a trial

    def begin(self) -> None:
        """A step begins."""
        trial, scaler = any(part.trial for part in self._parts.values()), self._state.loss_scaler()
        self._scaler = scaler if trial else None
        if self._feedback is not None:
            self._feedback.begin(keep=trial, scale=scaler.get("cur_scale", 1.0))

    def end(self, applied: bool) -> None:
        """The step has ended, and its update was applied or not. What judges spikes remembers skipped steps too, and
        the loss scaler an overflow: those steps were part of the run."""
        if self._feedback is not None:
            self._feedback.end(applied)
        if self._scaler is not None:
            self._state.restore_loss_scaler(self._scaler)

    def kept(self) -> dict[str, dict[str, Any]]:
        """What checkpoints keep of it, as JSON values; all ranks call it."""
        found = {OPTIMIZER: self._state.counters(), SCALER: self._state.loss_scaler()}
        return {**found, **{name: part.state() for name, part in self._parts.items() if "state" in part.points}}

    def restore(self, kept: Mapping[str, Mapping[str, Any]]) -> None:
        """From `kept`; what is missing is as in a new run."""
        self._state.restore_counters(kept.get(OPTIMIZER, {}))
        self._state.restore_loss_scaler(kept.get(SCALER, {}))
        for name, part in self._parts.items():
            if "restore" in part.points:
                part.restore(kept.get(name, {}))
        if self._feedback is not None:
            self._feedback.forget()
