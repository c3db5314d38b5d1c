"""Start and end of messages, measured without waiting for any of them.

Marks are taken at the call, when the call returns, when the operation is complete (a callback of its future) and
around `Work.wait`. On a CPU a mark is the time. On an accelerator it is an event on the current stream, whose time is
read after the step. The callback of an operation runs with a stream that waits only for it."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .traffic import Call

Mark = Any  # nanoseconds on a CPU, an event on an accelerator


class HostClock:
    """Marks are nanoseconds of this host.

    Args:
        now: the time.
    """

    def __init__(self, now: Callable[[], int] = time.monotonic_ns) -> None:
        self.mark: Callable[[], Mark] = now
        self.now = now

    def begin(self) -> None:
        """Begin a step."""

    def finish(self) -> None:
        """Prepare to read the marks of a step."""

    def read(self, mark: Mark) -> int:
        """Nanoseconds of a mark."""
        return mark

    def aside(self) -> bool:
        """Whether calls now do not delay the model's computation."""
        return False


class DeviceClock:
    """Marks are events. The first one is at the time when the device was empty, which the constructor waits for.

    Args:
        device: the module of an accelerator, such as `torch.cuda`.
        now: the host's time in nanoseconds.
    """

    def __init__(self, device: Any = torch.cuda, now: Callable[[], int] = time.monotonic_ns) -> None:
        self._device, self.now = device, now
        device.synchronize()
        self._base, self._at = self.mark(), float(now())
        self._bases: deque[Mark] = deque()  # of steps that are not read yet
        self._stream: Any = None

    def mark(self) -> Mark:
        """An event on the current stream."""
        event = self._device.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> None:
        """Begin a step, whose stream computes. Times between events are fp32, so each step has a base of its own."""
        self._stream = self._device.current_stream()
        self._bases.append(self.mark())

    def finish(self) -> None:
        """Prepare to read the marks of the first step that was not read. The device has done it."""
        base = self._bases.popleft()
        base.synchronize()
        self._at += self._base.elapsed_time(base) * 1e6
        self._base = base

    def read(self, mark: Mark) -> int:
        """Nanoseconds of a mark, on this host's clock."""
        mark.synchronize()  # returns at once, except for the last callbacks of a step
        return round(self._at + self._base.elapsed_time(mark) * 1e6)

    def aside(self) -> bool:
        """Whether the current stream is not the model's."""
        return self._stream is not None and self._device.current_stream() != self._stream


Clock = HostClock | DeviceClock


class Message:
    """One call of an operation.

    Attributes:
        call: its entry of the account.
        group: the process group, None for one that torch does not list.
        ranks: of the group, or sender and receiver, as ranks of the job.
        peer: place of the other rank in the group, None for collectives.
        size: bytes.
        aside: it was called on a stream of its own.
        start, end: marks. `end` is None until it is complete.
        stalls: pairs of marks between which no computation could continue.
    """

    __slots__ = ("aside", "call", "end", "group", "peer", "ranks", "size", "stalls", "start", "waited")

    def __init__(self, call: Call, group: Any, ranks: tuple[int, ...], peer: int | None, size: int) -> None:
        self.call, self.group, self.ranks, self.peer, self.size = call, group, ranks, peer, size
        self.start: Mark = None
        self.end: Mark = None
        self.waited: Mark = None
        self.stalls: list[tuple[Mark, Mark]] = []
        self.aside = False


class Timer:
    """Takes the marks of messages while it is installed.

    Args:
        clock: what a mark is.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.active = False
        self.messages: list[Message] = []
        self.spans: list[tuple[str, Mark, Mark]] = []  # phases of the step
        self._open: dict[int, Message] = {}  # by the identity of torch's handle, until a wait for it
        self._silent: set[tuple[str, str]] = set()  # (backend, operation) whose handles have no future
        self._plain: Any = None

    def install(self) -> None:
        """Measure `Work.wait`."""
        self._plain = plain = dist.Work.wait
        taken, clock = self._open.pop, self.clock

        def wait(work: Any, *args: Any, **options: Any) -> Any:
            message = taken(id(work), None)
            if message is None:
                return plain(work, *args, **options)
            begin = clock.mark()
            result = plain(work, *args, **options)
            message.waited = clock.mark()
            # a call that waits at once has stopped computation since it began
            message.stalls.append((begin if message.stalls else message.start, message.waited))
            return result

        setattr(dist.Work, "wait", wait)  # noqa: B010 - type checkers know its plain signature

    def remove(self) -> None:
        """Leave torch as it was."""
        if self._plain is not None:
            setattr(dist.Work, "wait", self._plain)  # noqa: B010
            self._plain = None
        self._open.clear()

    def forget(self, work: Any) -> None:
        """The handle of an operation that is not timed may have the identity of an earlier one."""
        self._open.pop(id(work), None)

    def take(self) -> tuple[list[Message], list[tuple[str, Mark, Mark]]]:
        """Messages and phases of a step, in the order of their calls (phases: of their ends)."""
        taken, self.messages, self.spans = (self.messages, self.spans), [], []
        return taken

    def call(self, message: Message, plain: Callable, group: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Do the operation, and mark its start and end."""
        clock = self.clock
        message.aside = clock.aside()
        message.start = clock.mark()
        work = plain(group, *args, **options)
        if work is None:  # part of a larger operation, which has its own handle
            return work
        self.messages.append(message)
        self._open[id(work)] = message
        waits = any(getattr(each, "asyncOp", None) is False for each in args)
        if not waits:
            message.stalls.append((message.start, clock.mark()))
            self._follow(message, group, work)
        return work

    def _follow(self, message: Message, group: Any, work: Any) -> None:
        """Mark the end of an operation by a callback, for a wait may come late or never."""
        kind = (group.name(), message.call.operation)
        if kind in self._silent:
            return

        def complete(_: Any) -> None:
            message.end = self.clock.mark()

        try:
            work.get_future().add_done_callback(complete)
        except RuntimeError:  # this backend has none for this operation: it ends with the wait for it
            self._silent.add(kind)


class Timed:
    """A message with its times in nanoseconds.

    Attributes:
        start, end: `end` is None where unknown.
        stalls: intervals in [start, end] in which no computation could continue.
        latest: when the last rank started it. None where unknown.
    """

    __slots__ = ("end", "latest", "message", "stalls", "start")

    def __init__(self, message: Message, clock: Clock, offset: int) -> None:
        self.message = message
        self.start = clock.read(message.start) - offset
        ends = [clock.read(mark) - offset for mark in (message.end, message.waited) if mark is not None]
        self.end = min(ends) if ends else None  # a callback may be late, and a wait may be long after the end
        self.stalls = [] if message.aside or self.end is None else self._within(clock, offset)
        self.latest: int | None = None

    def _within(self, clock: Clock, offset: int) -> list[tuple[int, int]]:
        assert self.end is not None
        pairs = [(clock.read(a) - offset, min(clock.read(b) - offset, self.end)) for a, b in self.message.stalls]
        return [(a, b) for a, b in pairs if a < b]

    @property
    def exposed(self) -> int:
        """Nanoseconds in which no computation could continue."""
        return sum(b - a for a, b in self.stalls)

    @property
    def waiting(self) -> int | None:
        """Nanoseconds until the last rank started."""
        if self.latest is None or self.end is None:
            return None
        return max(0, min(self.latest, self.end) - self.start)


ROUNDS = 16  # collectives that bound a clock's offset


@dataclass(frozen=True)
class Offset:
    """Offset of this rank's clock to that of rank 0."""

    nanoseconds: int = 0  # to subtract from this rank's times
    error: int = 0  # bound of its error in nanoseconds


def bounded(starts: Sequence[int], ends: Sequence[int], first: Sequence[int], last: Sequence[int]) -> Offset:
    """The offset from sums over all ranks. Each sum ends on every rank after it has begun on every rank.

    So the offset is not above (end here - start there) and not below (start here - end there), for each of the sums.
    It is 0 where these bounds allow it.

    Args:
        starts, ends: of this rank.
        first, last: starts and ends of rank 0.
    """
    low = max(here - there for here, there in zip(starts, last))
    high = min(here - there for here, there in zip(ends, first))
    if low <= 0 <= high:
        return Offset(0, max(high, -low))
    return Offset((low + high) // 2, (high - low + 1) // 2)


def measure_offset(now: Callable[[], int], device: torch.device | str = "cpu") -> Offset:
    """This rank's offset. All ranks call it together.

    Args:
        now: this host's time in nanoseconds.
        device: of the tensors that are sent.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Offset()
    one, starts, ends = torch.zeros(1, device=device), [], []
    for _ in range(ROUNDS):
        starts.append(now())
        dist.all_reduce(one)
        one.item()  # waits also where the operation is only queued
        ends.append(now())
    theirs = torch.tensor([starts, ends], dtype=torch.int64, device=device)
    dist.broadcast(theirs, 0)
    return bounded(starts, ends, *theirs.tolist())


def find_last(timed: Sequence[Timed], device: torch.device | str = "cpu") -> None:
    """Set `latest` of each message of a step. All ranks call it after the same step.

    The n-th collective of a group is the same on all its members, and the n-th message that one rank sends is the n-th
    that the other receives. Where the numbers differ, `latest` stays None. Every rank visits its groups, and then its
    pairs, in the same order, so no ranks wait for each other in a circle."""
    groups: dict[tuple, list[Timed]] = {}
    pairs: dict[tuple, list[Timed]] = {}
    for each in timed:
        message = each.message
        if message.group is None:
            continue
        if message.call.operation not in ("send", "recv"):
            groups.setdefault((message.ranks, message.group.group_name), []).append(each)
        elif message.peer is not None:
            pairs.setdefault((message.ranks, message.group.group_name), []).append(each)
    for _, found in sorted(groups.items(), key=lambda item: item[0]):
        _of_group(found, device)
    for _, found in sorted(pairs.items(), key=lambda item: item[0]):
        _of_pair(found, device)


def _of_group(timed: list[Timed], device: torch.device | str) -> None:
    group = timed[0].message.group
    counts = torch.tensor([len(timed), -len(timed)], device=device)
    dist.all_reduce(counts, dist.ReduceOp.MAX, group)
    if counts[0] != -counts[1]:
        return
    latest = torch.tensor([each.start for each in timed], dtype=torch.int64, device=device)
    dist.all_reduce(latest, dist.ReduceOp.MAX, group)
    for each, value in zip(timed, latest.tolist()):
        each.latest = value


def _of_pair(timed: list[Timed], device: torch.device | str) -> None:
    """Sends of one rank and receives of the other, and the reverse."""
    message = timed[0].message
    first = dist.get_rank() == min(message.ranks)
    ours, theirs = ([each for each in timed if each.message.call.operation == kind] for kind in ("send", "recv"))
    counts = torch.tensor([len(ours), len(theirs)], device=device)
    found = _swapped(message, counts, first)
    if found.tolist() != [len(theirs), len(ours)]:
        return
    starts = torch.tensor([each.start for each in (*ours, *theirs)], dtype=torch.int64, device=device)
    other = _swapped(message, starts, first).tolist()
    for each, start in zip((*theirs, *ours), other):
        each.latest = max(each.start, start)


def _swapped(message: Message, mine: torch.Tensor, first: bool) -> torch.Tensor:
    other = torch.empty_like(mine)
    for sends in (first, not first):
        if sends:
            dist.send(mine, group=message.group, group_dst=message.peer)
        else:
            dist.recv(other, group=message.group, group_src=message.peer)
    return other
