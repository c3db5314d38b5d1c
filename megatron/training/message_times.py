"""Durations of a step's messages on this rank: taken in the step, read after it, and split with the other ranks' help.

The step itself waits for nothing. Ranks exchange their times between steps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.parallel.messages.account import Recorder, phase
from megatron.parallel.messages.clocks import Offset, find_latest, measure_offset
from megatron.parallel.messages.durations import Duration, Durations, MessageKind, members_text
from megatron.parallel.messages.timing import Clock, DeviceClock, HostClock, Message, Timed, Timer

KEPT = 4  # steps whose single messages are kept for a trace
MOST = 100_000  # messages that are kept
AGAIN = 100  # timed steps between two comparisons of clocks


@dataclass(frozen=True)
class StepMessages:
    """A step's messages, in nanoseconds of rank 0's clock.

    Attributes:
        spans: (phase, begin, end).
    """

    step: int
    messages: list[Timed]
    spans: list[tuple[str, int, int]]

    def durations(self) -> Durations:
        found = Durations()
        for each in self.messages:
            if each.end is not None:
                call, waiting = each.message.call, each.waiting
                kind = MessageKind(call.phase, call.group, members_text(each.message.ranks), call.operation, call.dtype)
                last = each.latest is not None and each.latest <= each.start
                found.add(
                    kind,
                    Duration(
                        1,
                        each.message.size,
                        (each.end - each.start) / 1e9,
                        each.exposed / 1e9,
                        (waiting or 0) / 1e9,
                        int(waiting is not None),
                        int(last),
                    ),
                )
        return found

    def record(self, offset: Offset) -> dict[str, Any]:
        """Record of a file: each message as [phase, layer, group, members, operation, dtype, bytes, start, end,
        latest, stalls]."""
        rows = []
        for each in self.messages:
            call, members = each.message.call, members_text(each.message.ranks)
            rows.append(
                [call.phase, call.layer, call.group, members, call.operation, call.dtype, each.message.size,
                 each.start, each.end, each.latest, each.stalls]
            )  # fmt: skip
        return {"step": self.step, "clock_error": offset.error, "spans": self.spans, "messages": rows}


def clock_of(device: torch.device) -> Clock:
    """The clock for marks on a device."""
    return HostClock() if device.type == "cpu" else DeviceClock(torch.get_device_module(device))


class MessageTimes:
    """Times the recorder's messages between the beginning and the end of timed steps."""

    def __init__(self, recorder: Recorder, device: torch.device) -> None:
        assert recorder.timer is not None
        self.timer: Timer = recorder.timer
        self._device, self._offset, self._steps = device, Offset(), 0
        self._unread: deque[tuple[int, Offset, list[Message], list[tuple]]] = deque()
        self.kept: deque[tuple[StepMessages, Offset]] = deque()

    def begin(self) -> None:
        """Time the next step. All ranks call it."""
        if self._steps % AGAIN == 0:
            with phase("times"):
                self._offset = measure_offset(self.timer.clock.now, self._device)
        self._steps += 1
        self.timer.clock.begin()
        self.timer.active = True

    def end(self, step: int) -> None:
        """The step's calls are made."""
        self.timer.active = False
        self._unread.append((step, self._offset, *self.timer.take()))

    def read(self, step: int) -> tuple[int, Durations] | None:
        """The last timed step up to `step`, and its sums. None without one. The device must have done that step. All
        ranks call it."""
        found = None
        while self._unread and self._unread[0][0] <= step:
            at, offset, messages, spans = self._unread.popleft()
            clock, back = self.timer.clock, offset.nanoseconds
            clock.finish()
            timed = [Timed(each, clock, back) for each in messages]
            if dist.is_initialized() and dist.get_world_size() > 1:
                with phase("times"):
                    find_latest(timed, self._device)
            read = [(name, clock.read(a) - back, clock.read(b) - back) for name, a, b in spans]
            found = StepMessages(at, timed, read)
            for each in messages:
                each.group = None  # no longer needed

            self._keep(found, offset)
        return None if found is None else (found.step, found.durations())

    def _keep(self, found: StepMessages, offset: Offset) -> None:
        self.kept.append((found, offset))
        while len(self.kept) > 1 and (len(self.kept) > KEPT or sum(len(each.messages) for each, _ in self.kept) > MOST):
            self.kept.popleft()
