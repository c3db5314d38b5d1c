"""When messages began and ended: marks, offsets of clocks, and the part of a message that is waiting for the last."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from megatron.parallel.messages.account import Recorder, phase
from megatron.parallel.messages.timing import (
    DeviceClock,
    HostClock,
    Message,
    Offset,
    Timed,
    bounded,
    find_last,
    measure_offset,
)
from megatron.parallel.messages.traffic import Call, Duration, Durations, MessageKind, bus_bandwidth
from tests.workers import run

CALL = Call("backward", "", "data", 3, "all_reduce", "fp32")


def message(start: int, end: int | None, stalls: list[tuple[int, int]], waited: int | None = None) -> Message:
    found = Message(CALL, None, (0, 1, 2), None, 8)
    found.start, found.end, found.waited, found.stalls = start, end, waited, stalls
    return found


def test_exposed_is_what_lies_between_begin_and_end():
    """Called at 10, complete at 50: the call took until 13, somebody waited from 40 to 60."""
    timed = Timed(message(10, 50, [(10, 13), (40, 60)], 60), HostClock(), 0)
    assert (timed.start, timed.end, timed.exposed) == (10, 50, 13)
    late = Timed(message(10, 55, [(10, 13), (40, 45)], 45), HostClock(), 5)  # the callback came after the wait
    assert (late.start, late.end, late.exposed) == (5, 40, 8)
    never = Timed(message(10, None, [(10, 13)]), HostClock(), 0)
    assert never.end is None and never.exposed == 0 and never.waiting is None


def test_waiting_is_until_the_last_rank_came():
    """Three ranks come at 0, 0 and 50 and all end at 60: they wait 50, 50 and 0, and the transfer takes 10."""
    found = []
    for start in (0, 0, 50):
        timed = Timed(message(start, 60, [(start, 60)], 60), HostClock(), 0)
        timed.latest = 50
        found.append((timed.waiting, timed.end - timed.start - timed.waiting))
    assert found == [(50, 10), (50, 10), (0, 10)]


def test_an_offset_is_bounded_by_sums():
    """This rank's clock is 1000 ahead. True times of the sums: rank 0 is in them from 100 to 120 and from 200 to 230,
    this rank from 110 to 118 and from 195 to 228."""
    assert bounded([1110, 1195], [1118, 1228], [100, 200], [120, 230]) == Offset(1004, 14)
    low, high = max(1110 - 120, 1195 - 230), min(1118 - 100, 1228 - 200)
    assert low <= 1000 <= high and (low + high) // 2 == 1004
    assert bounded([110, 195], [118, 228], [100, 200], [120, 230]) == Offset(0, 18), "that may be one clock"


class Told:
    """A clock that reads times from a list, and then the last one."""

    def __init__(self, *times: int) -> None:
        self._times = itertools.chain(times, itertools.repeat(times[-1]))

    def __call__(self) -> int:
        return next(self._times)


def told_times() -> list:
    """A sum to which rank 1 comes last, a message that its receiver awaits, and a sum that is not awaited at once."""
    rank = dist.get_rank()
    # marks: phase begins, sum, its wait (2), message, call returned, its wait (2), sum, call returned, wait (2)
    times = [(0, 10, 12, 60, 70, 71, 72, 90, 100, 103, 140, 150), (0, 50, 52, 60, 85, 86, 87, 90, 110, 111, 130, 150)]
    recorder = Recorder(Mesh.build(Layout(data=2), None), HostClock(Told(*times[rank], 170)))
    recorder.install()
    recorder.timer.active = True
    try:
        with phase("backward"):
            dist.all_reduce(torch.ones(4))
            (dist.recv if rank == 0 else dist.send)(torch.ones(3), 1 - rank)
            work = dist.all_reduce(torch.ones(2), async_op=True)
            work.get_future().wait()  # and so its callback has taken a mark, at a time that only the thread knows
            work.wait()
        recorder.timer.active = False
        dist.all_reduce(torch.ones(1))
        messages, spans = recorder.timer.take()
    finally:
        recorder.remove()
    timed = [Timed(each, HostClock(), 0) for each in messages]
    find_last(timed)
    first = [(each.message.call.operation, each.start, each.end, each.latest, each.exposed) for each in timed[:2]]
    counted = recorder.tally.by("operation")
    return [first, (timed[2].start, timed[2].latest), [name for name, *_ in spans], counted]


def test_two_ranks_on_told_clocks():
    (one, other) = run(2, told_times)
    assert one[0] == [("all_reduce", 10, 60, 50, 50), ("recv", 70, 90, 85, 19)]
    assert other[0] == [("all_reduce", 50, 60, 50, 10), ("send", 85, 90, 85, 4)]
    assert one[1] == (100, 110) and other[1] == (110, 110)
    for found in (one, other):
        assert found[2] == ["backward"], "phases are timed as well"
        assert found[3]["all_reduce",][0] == 3, "what is not timed is still counted"


def in_order() -> list:
    """Rank 1 calls the sum after rank 0 is in it. A message of rank 0 says so."""
    mesh, rank = Mesh.build(Layout(data=2), None), dist.get_rank()
    recorder = Recorder(mesh, HostClock())
    offset, plain = measure_offset(recorder.timer.clock.now), dist.Work.wait
    recorder.install()
    recorder.timer.active = True
    try:
        x = torch.full((1000,), float(rank + 1))
        if rank == 0:
            work = dist.all_reduce(x, async_op=True)
            dist.send(torch.ones(1), 1)
            work.wait()
        else:
            dist.recv(torch.empty(1), 0)
            dist.all_reduce(x)
        recorder.timer.active = False
        messages, _ = recorder.timer.take()
    finally:
        recorder.remove()
    timed = [Timed(each, recorder.timer.clock, offset.nanoseconds) for each in messages]
    find_last(timed)
    (sum_,) = (each for each in timed if each.message.call.operation == "all_reduce")
    assert dist.Work.wait is plain and x.tolist() == [3.0] * 1000
    return [offset.nanoseconds, offset.error > 0, sum_.latest > sum_.start, sum_.waiting > 0, sum_.exposed,
            sum_.end - sum_.start, sum_.latest - sum_.start]  # fmt: skip


def test_the_rank_that_comes_last_waits_for_nobody():
    first, last = run(2, in_order)
    assert first[:2] == last[:2] == [0, True], "two processes of one machine have one clock"
    assert first[2:4] == [True, True] and last[2:4] == [False, False]
    assert 0 < first[4] <= first[5] and last[4] == last[5], "who waits at once is exposed throughout"
    assert last[6] == 0


def of_unequal_numbers() -> list:
    """One rank knows of one sum more than the other: none is reported, and no rank hangs."""
    mesh, rank = Mesh.build(Layout(data=2), None), dist.get_rank()
    found = []
    for start in range(1 + rank):
        each = Message(CALL, mesh.data.group, (0, 1), None, 4)
        each.start = each.end = start
        found.append(Timed(each, HostClock(), 0))
    find_last(found)
    return [each.latest for each in found]


def test_unequal_numbers_of_messages_are_left_alone():
    assert run(2, of_unequal_numbers) == [[None], [None, None]]


class Device:
    """An accelerator whose streams are lists of events, and whose time passes when somebody says so."""

    def __init__(self) -> None:
        self.time, self.stream = 5.0, "main"

    def Event(self, enable_timing: bool) -> Device.Mark:  # noqa: N802 - the name that torch.cuda has
        assert enable_timing
        return Device.Mark(self)

    def synchronize(self) -> None:
        pass

    def current_stream(self) -> str:
        return self.stream

    class Mark:
        def __init__(self, device: Device) -> None:
            self.device = device

        def record(self) -> None:
            self.at = self.device.time

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, later: Device.Mark) -> float:
            return later.at - self.at


def test_marks_of_a_device_are_on_the_hosts_clock():
    device = Device()
    clock = DeviceClock(device, Told(2_000_000))  # the device's 5 ms are the host's 2 ms
    device.time = 7.0
    clock.begin()
    mark = clock.mark()
    device.time = 7.25
    clock.begin()  # of the next step, before this one is read
    clock.finish()
    assert clock.read(mark) == 4_000_000 and clock.read(clock.mark()) == 4_250_000
    assert not clock.aside()
    device.stream = "other"
    assert clock.aside()
    found = message(mark, clock.mark(), [(mark, clock.mark())])
    found.aside = True
    assert Timed(found, clock, 0).exposed == 0, "a stream of its own holds nothing up"


def test_bandwidth_on_the_bus_is_of_the_transfer_alone():
    """nccl-tests: 2 (n - 1) / n of S for an all-reduce. 4 ranks, 1 MB in 1.62 ms after 1 ms of waiting."""
    kind = MessageKind("backward", "data", "0 1 2 3", "all_reduce", "fp32")
    each = Duration(1, 10**6, 2.62e-3, 2.62e-3, 1e-3, 1, 0)
    assert bus_bandwidth(kind, each) == pytest.approx(0.926e9, rel=1e-3)
    assert bus_bandwidth(kind, each._replace(split=0)) is None, "nobody knows who came last"
    assert bus_bandwidth(kind, each._replace(bytes=0)) is None
    pair = kind._replace(operation="recv", members="0 1")
    assert bus_bandwidth(pair, each) == pytest.approx(10**6 / 1.62e-3)


def test_damaged_durations_are_refused():
    row = ["backward", "data", "0 1", "all_reduce", "fp32", 1, 8, 0.5, 0.5, 0.0, 1, 0]
    assert Durations.of_rows([row]).rows() == [row]
    wrong = ((0, 1), (5, 1.5), (6, -8), (7, "1"), (7, float("inf")), (8, -0.5), (10, True))
    for place, value in wrong:
        with pytest.raises(ValueError, match="row of durations"):
            Durations.of_rows([[*row[:place], value, *row[place + 1 :]]])
    with pytest.raises(ValueError):
        Durations.of_rows([row[:-1]])
    with pytest.raises(ValueError):
        Durations.of_rows([7])
