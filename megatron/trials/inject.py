"""Hooks that hurt a run from inside, where and when a trial orders it."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron.checkpoint.names import step_name
from megatron.training.hook import Hook

if TYPE_CHECKING:
    from megatron.training.trainer import Trainer

NAN, SPIKE, FLIP, DIE_IN_SAVE = "nan", "spike", "flip", "die_in_save"
KINDS = (NAN, SPIKE, FLIP, DIE_IN_SAVE)
HUGE = 1e6  # what a gradient is multiplied with


class KillAt(Hook):
    """The last rank ends itself with SIGKILL before a step, once there is a checkpoint of the step before.

    Args:
        step: completed updates of that checkpoint.
        folder: of checkpoints.
    """

    def __init__(self, step: int, folder: str) -> None:
        self._step, self._checkpoint = step, Path(folder) / step_name(step)

    def before_step(self, trainer: Trainer, step: int) -> None:
        last = trainer.mesh.rank == trainer.mesh.layout.world_size - 1
        if last and trainer.start < self._step < step and self._checkpoint.exists():
            os.kill(os.getpid(), signal.SIGKILL)


class Miscompute(Hook):
    """In one step a rank computes a loss that is too large, or none at all (nan).

    Args:
        step: number of the update.
        size: what the head's outputs are multiplied with.
        cause: "transient": the first time alone; "data": whenever the step is computed; "host": whenever it is in
            `place` (what the launcher says in JOB_PLACE).
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


class Orders(Hook):
    """Does once what a file of the name `<kind>.<rank>` asks for, and removes the file first.

    nan and spike spoil a gradient of this rank in the next step, flip changes a bit of a weight, die_in_save ends the
    rank with SIGKILL some time after the next checkpoint has begun to be written.

    Args:
        folder: of the files.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._handle: Any = None

    def before_step(self, trainer: Trainer, step: int) -> None:
        rank = trainer.mesh.rank
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        for kind, factor in ((NAN, float("nan")), (SPIKE, HUGE)):
            if self._take(kind, rank):
                self._spoil(trainer, factor)
        if self._take(FLIP, rank):
            flip(_parameter(trainer))

    def before_save(self, trainer: Trainer) -> None:
        if self._take(DIE_IN_SAVE, trainer.mesh.rank):
            threading.Thread(target=_die, args=(trainer.completed % 10,), daemon=True).start()

    def _take(self, kind: str, rank: int) -> bool:
        try:
            (self._folder / f"{kind}.{rank}").unlink()
        except FileNotFoundError:
            return False
        return True

    def _spoil(self, trainer: Trainer, factor: float) -> None:
        """Once: a step that is computed again finds the gradient in order."""
        left = [factor]

        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            return gradient * left.pop() if left else gradient

        self._handle = _parameter(trainer).register_hook(spoil)


def flip(tensor: torch.Tensor) -> None:
    """Change the first element by about half: in fp32 and bf16 the highest bit of the mantissa. A lower one may vanish
    in the rounding of the next update, and then there is nothing to be found."""
    with torch.no_grad():
        tensor.view(-1)[:1].view(torch.uint8)[tensor.element_size() - 2] ^= 1 << 6


def _parameter(trainer: Trainer) -> torch.nn.Parameter:
    return next(getattr(trainer.engine, "deepspeed").module.parameters())  # noqa: B009  (the protocol does not have it)


def _die(milliseconds: int) -> None:
    time.sleep(milliseconds / 1000)
    os.kill(os.getpid(), signal.SIGKILL)
