"""Hooks that damage a run from inside, where and when a trial orders it."""

import os
import signal
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.format.durable import step_name
from megatron.checkpoint.format.fragment import MASTER
from megatron.engine.replicas import named_pieces
from megatron.engine.state import EngineState
from megatron.training.hook import Hook
from megatron.training.trainer import Trainer

NAN, SPIKE, GRADIENT = "nan", "spike", "gradient"
FLIP, FLIP_MASTER, FLIP_MOMENT = "flip", "flip_master", "flip_moment"
HELD = {FLIP: ("weight", MASTER), FLIP_MASTER: (MASTER,), FLIP_MOMENT: ("exp_avg",)}  # states: the first that exists
DIE_IN_SAVE, SLOW_DISK, CLOCK = "die_in_save", "slow_disk", "clock"
KINDS = (NAN, SPIKE, GRADIENT, *HELD, DIE_IN_SAVE, SLOW_DISK, CLOCK)
HUGE = 1e6  # factor of a gradient
SLOW = (0.5, 8.0)  # seconds added to each fsync, and seconds until the disk is normal again
JUMP = 5400.0  # seconds by which a clock jumps, forwards on even ranks and backwards on odd ones


class KillAt(Hook):
    """The last rank kills itself before a step, once the checkpoint of the step before exists.

    Args:
        step: completed updates of that checkpoint.
        folder: folder of checkpoints.
    """

    def __init__(self, step: int, folder: str) -> None:
        self._step, self._checkpoint = step, Path(folder) / step_name(step)

    def before_step(self, trainer: Trainer, step: int) -> None:
        last = trainer.mesh.rank == trainer.mesh.layout.world_size - 1
        if last and trainer.start < self._step < step and self._checkpoint.exists():
            os.kill(os.getpid(), signal.SIGKILL)


class Nudge(Hook):
    """Moves every weight by half a last digit of the compute type, up or down, when a run resumes at a step. The change
    of its losses measures the effect of rounding.

    Args:
        step: completed updates of the checkpoint.
    """

    def __init__(self, step: int) -> None:
        self._step = step

    def on_start(self, trainer: Trainer) -> None:
        if trainer.start != self._step:
            return
        types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        half = torch.finfo(types[trainer.config.precision.compute]).eps / 2
        state: Any = trainer.engine.state  # `RunState` has no masters
        for each in state.masters():
            shard = 0 if each.tensor.shard is None else each.tensor_rank
            draw = torch.Generator().manual_seed(zlib.crc32(f"{each.tensor.name} {shard}".encode()))
            signs = torch.randint(0, 2, (each.spec.shard_size,), generator=draw)[
                each.start : each.start + len(each.data)
            ]
            each.data.mul_(1 + half * (2 * signs - 1).to(each.data))
        state.refresh()


class Orders(Hook):
    """Carries out the order in a file `<kind>.<rank>` once, and removes the file first.

    `nan` and `spike` spoil a gradient of this rank in the next step. `gradient` flips a bit of one after ranks have
    summed it. `flip`, `flip_master` and `flip_moment` flip a bit of a weight, a master weight or a first moment.
    `die_in_save` kills the rank some time after the next checkpoint has begun to be written. `slow_disk` slows this
    rank's disk down for some seconds. `clock` makes the clock of this process jump."""

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
        if self._take(GRADIENT, rank):
            corrupt_gradient(getattr(trainer.engine, "optimizer"))  # noqa: B009  (the protocol does not have it)
        for kind, states in HELD.items():
            if self._take(kind, rank):
                flip(held(getattr(trainer.engine, "state"), *states))  # noqa: B009
        if self._take(SLOW_DISK, rank):
            slow_disk(*SLOW)
        if self._take(CLOCK, rank):
            clock_jumps(-JUMP if rank % 2 else JUMP)

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
        """Once: a step that is computed again gets the true gradient."""
        left = [factor]

        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            return gradient * left.pop() if left else gradient

        self._handle = _parameter(trainer).register_hook(spoil)


def flip(tensor: torch.Tensor) -> None:
    """Change the first element by about half: flips the highest bit of the mantissa in fp32 and bf16. The next
    update might round a lower bit away."""
    with torch.no_grad():
        tensor.view(-1)[:1].view(torch.uint8)[tensor.element_size() - 2] ^= 1 << 6


def held(state: EngineState, *states: str) -> torch.Tensor:
    """Largest element, [1], of the first tensor of this rank that has one of these states."""
    pieces = list(named_pieces(state))
    for each in states:
        found = next((values for name, _, values in pieces if name.endswith(f"({each})")), None)
        if found is not None:
            flat = found.detach().view(-1)
            return flat[int(flat.abs().argmax()) :][:1]
    raise LookupError(f"this rank has none of {', '.join(states)}")


def corrupt_gradient(optimizer: torch.optim.Optimizer) -> None:
    """Flip a bit of the largest element of the first gradient, in this rank's next update."""
    update = optimizer.step

    def step(*arguments: Any, **options: Any) -> Any:
        vars(optimizer)["step"] = update
        gradients = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        flat = next(gradients).view(-1)
        flip(flat[int(flat.abs().argmax()) :])
        return update(*arguments, **options)

    vars(optimizer)["step"] = step


def slow_disk(more: float, seconds: float) -> None:
    """Delay every fsync of this process, for some seconds."""
    real, end = os.fsync, time.monotonic() + seconds

    def slow(handle: int) -> None:
        if time.monotonic() < end:
            time.sleep(more)
        real(handle)

    vars(os)["fsync"] = slow


def clock_jumps(seconds: float) -> None:
    """Shift `time.time` in this process from now on."""
    real = time.time
    vars(time)["time"] = lambda: real() + seconds


def _parameter(trainer: Trainer) -> torch.nn.Parameter:
    return next(getattr(trainer.engine, "deepspeed").module.parameters())  # noqa: B009  (the protocol does not have it)


def _die(milliseconds: int) -> None:
    time.sleep(milliseconds / 1000)
    os.kill(os.getpid(), signal.SIGKILL)
