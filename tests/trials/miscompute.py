"""A hook that computes wrong losses, for tests of spikes and their attribution."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from megatron.training.hook import Hook

if TYPE_CHECKING:
    from megatron.training.trainer import Trainer


class Miscompute(Hook):
    """In one step a rank computes a loss that is too large, or nan.

    Args:
        step: number of the update.
        size: factor of the head's outputs.
        cause: "transient": only the first time. "data": whenever the step is computed. "host": whenever it is computed
            in `place`, the launcher's JOB_PLACE.
    """

    def __init__(self, step: int, size: float, cause: str, place: str = "") -> None:
        self._step, self._size, self._cause, self._place = step, size, cause, place
        self._armed = False

    def on_start(self, trainer: Trainer) -> None:
        modules = reversed(list(getattr(trainer.engine, "deepspeed").module.modules()))  # noqa: B009
        head = next((module for module in modules if type(module).__name__ == "Head"), None)
        if head is not None:
            head.register_forward_hook(self._spoil)

    def before_step(self, trainer: Trainer, step: int) -> None:
        last = trainer.mesh.rank == trainer.mesh.layout.world_size - 1
        here = os.environ.get("JOB_PLACE") == self._place if self._cause == "host" else last
        self._armed = step == self._step and here

    def _spoil(self, module: torch.nn.Module, inputs: object, outputs: Any) -> Any:
        if not self._armed:
            return None
        self._armed = self._cause != "transient"
        return tuple(each * self._size for each in outputs)
