"""State that a step changes outside the tensors of checkpoints, in one list for everything that undoes a step.

An update that is skipped, or computed as a trial (audits, the noise scale), leaves all of it unchanged. A run that
returns to a checkpoint sets all of it, to the checkpoint's values or a new run's."""

from collections.abc import Mapping
from typing import Any

from megatron.parallel.transport.compression import CompressedSum

from .part import EnginePart
from .parts import COMPRESSION
from .state import EngineState

OPTIMIZER, SCALER = "optimizer", "loss_scaler"


class Undo:
    """The optimizer's counts, the loss scaler of fp16, the error feedback of compressed gradients, and the state of
    parts, such as the statistics of spikes.

    Weights, optimizer states, routers' corrections and the average of the weights are tensors of checkpoints
    (`EngineState.targets`). A step without an update does not change them."""

    def __init__(self, state: EngineState, parts: Mapping[str, EnginePart]) -> None:
        self._state, self._parts = state, parts
        compression: Any = parts.get(COMPRESSION)
        self._feedback: CompressedSum | None = compression and compression.sums
        self._scaler: Mapping[str, Any] | None = None  # before a trial

    def begin(self) -> None:
        trial, scaler = any(part.trial for part in self._parts.values()), self._state.loss_scaler()
        self._scaler = scaler if trial else None
        if self._feedback is not None:
            self._feedback.begin(keep=trial, scale=scaler.get("cur_scale", 1.0))

    def end(self, applied: bool) -> None:
        """The step has ended. Trials restore the loss scaler. Other skipped steps are part of the run, so the
        statistics of spikes and the loss scaler keep them."""
        if self._feedback is not None:
            self._feedback.end(applied)
        if self._scaler is not None:
            self._state.restore_loss_scaler(self._scaler)

    def kept(self) -> dict[str, dict[str, Any]]:
        """The state for a checkpoint, as JSON values. All ranks call it."""
        found = {OPTIMIZER: self._state.counters(), SCALER: self._state.loss_scaler()}
        return {**found, **{name: part.state() for name, part in self._parts.items() if "state" in part.points}}

    def restore(self, kept: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore the result of `kept`. Missing values are reset, as in a new run."""
        self._state.restore_counters(kept.get(OPTIMIZER, {}))
        self._state.restore_loss_scaler(kept.get(SCALER, {}))
        for name, part in self._parts.items():
            if "restore" in part.points:
                part.restore(kept.get(name, {}))
        if self._feedback is not None:
            self._feedback.forget()
