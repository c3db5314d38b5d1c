"""A pipeline's schedule that reports to the beacon and can be interrupted between its steps."""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from megatron.parallel.messages.account import phase
from megatron.worker.beacon import BACKWARD, FORWARD, OPTIMIZER, REDUCE, Beacon

Look = Callable[[int, int], None]  # see `protocol.Engine.step`

_PHASES = {
    "BackwardPass": BACKWARD,
    "SendGrad": BACKWARD,
    "RecvGrad": BACKWARD,
    "ReduceGrads": REDUCE,
    "ReduceTiedGrads": REDUCE,
    "OptimizerStep": OPTIMIZER,
}
_ACCOUNTED = {FORWARD: "forward", BACKWARD: "backward", REDUCE: "backward", OPTIMIZER: "update"}


class _Schedule:
    """A pipeline's schedule with a call of `look` between its steps. Each instruction is reported to the beacon. Stages
    send and receive within the same steps, so no message is in flight where all have done the same number of steps."""

    def __init__(self, schedule: Any, look: Look | None, beacon: Beacon) -> None:
        self._schedule, self._look, self._beacon = schedule, look, beacon
        self.num_pipe_buffers = schedule.num_pipe_buffers

    def __iter__(self) -> Iterator[Iterator[Any]]:
        steps = list(self._schedule)
        for number, commands in enumerate(steps):
            if number and self._look is not None:
                self._look(number, len(steps))
            yield self._told(commands, number + 1, len(steps))

    def _told(self, commands: list[Any], number: int, parts: int) -> Iterator[Any]:
        for command in commands:
            name = type(command).__name__
            self._beacon.at(_PHASES.get(name, FORWARD), number, parts, name.encode())
            yield command


def with_phases(instructions: dict[type, Callable[..., Any]]) -> dict[type, Callable[..., Any]]:
    """The instructions of a pipeline's schedule, each accounted to its phase of a step."""
    return {each: phase(_ACCOUNTED[_PHASES.get(each.__name__, FORWARD)])(run) for each, run in instructions.items()}


@contextlib.contextmanager
def any_zero_stage() -> Iterator[None]:
    """DeepSpeed's pipeline engine can be built at ZeRO 2, whose reduction is replaced (`placed.py`)."""
    from deepspeed.runtime.pipe import engine

    with mock.patch.object(engine, "ZeroStageEnum", SimpleNamespace(gradients=3)):
        yield


@contextlib.contextmanager
def looked_into(engine: Any, look: Look | None, beacon: Beacon) -> Iterator[None]:
    """Call `look` between the steps of the schedule of DeepSpeed's pipeline engine."""
    execute = engine._exec_schedule
    engine._exec_schedule = lambda schedule: execute(_Schedule(schedule, look, beacon))
    try:
        yield
    finally:
        del engine._exec_schedule
