"""An agent reads the beacon that a rank wrote: at any moment, of a process in any state, and of any bytes."""

from __future__ import annotations

import mmap
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from megatron.worker.beacon import (
    BACKWARD,
    BEACON,
    BRIEF,
    DATA,
    FORWARD,
    SAVE,
    SIZE,
    STACKS,
    Beacon,
    ranks_of,
    ranks_text,
    read,
)
from tests.paths import ROOT


def test_what_is_written_is_read():
    memory = mmap.mmap(-1, SIZE)
    beacon = Beacon(memory)
    assert read(memory) is None, "nothing was said yet"
    before = time.monotonic()
    beacon.begin(3)
    beacon.at(FORWARD, 2, 4, b"layer 7")
    slot = beacon.group("k", "the data group", "0-6:2")
    beacon.enter(slot, b"all_reduce", 1000)
    place = read(memory)
    assert (place.pid, place.step, place.phase, place.part, place.parts) == (os.getpid(), 3, "forward", 2, 4)
    assert place.detail == "layer 7" and before <= place.since <= time.monotonic()
    (call,) = place.calls
    assert (call.name, call.members, call.operation, call.elements) == ("the data group", "0-6:2", "all_reduce", 1000)
    assert (call.number, call.inside) == (1, True)
    beacon.leave()
    with beacon.during(SAVE):
        assert read(memory).phase == "save"
    assert read(memory).phase == "forward" and read(memory).part == 2, "the phase around goes on"
    assert not read(memory).calls[0].inside


def test_a_call_that_differs_from_the_step_before_is_marked():
    memory = mmap.mmap(-1, SIZE)
    beacon = Beacon(memory)
    slot = beacon.group("k", "g", "0-1")
    new = []
    for sizes in ((1, 2, 3), (1, 2, 3), (1, 3)):
        beacon.begin(0)
        for size in sizes:
            beacon.enter(slot, b"all_reduce", size)
            new.append(read(memory).calls[0].new)
            beacon.leave()
    assert new == [False] * 7 + [True], "the second call of the third step was left out"


def test_time_in_phases_is_kept_apart_from_waiting():
    beacon = Beacon()
    slot = beacon.group("k", "g", "0-1")
    begin = time.monotonic()
    beacon.begin(0)
    time.sleep(0.02)
    beacon.at(BACKWARD)
    changed = time.monotonic()
    time.sleep(0.03)
    beacon.enter(slot, b"all_reduce", 1)
    time.sleep(0.2)
    beacon.leave()
    beacon.at(SAVE)
    end = time.monotonic()
    assert 0.02 <= beacon.own[DATA] <= changed - begin
    assert 0.03 <= beacon.own[BACKWARD] <= end - begin - beacon.waited and beacon.waited >= 0.2
    assert beacon.own[DATA] + beacon.own[BACKWARD] + beacon.waited <= end - begin


def test_brief_micro_batches_are_told_of_together():
    beacon, told = Beacon(), []
    for seconds in (0.0, 0.0, 2.5 * BRIEF, 0.0):
        beacon.begin(0)
        told.append(beacon.tells_of(2))
        time.sleep(seconds)
    assert told == [True, False, False, True], "as long as those of the step before"


def test_any_bytes_give_a_place_or_none():
    draw, memory = random.Random(5), mmap.mmap(-1, SIZE)
    Beacon(memory).at(FORWARD)
    whole = bytes(memory)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(draw.choice((1, 5, 400))):
            damaged[draw.randrange(SIZE)] = draw.randrange(256)
        read(bytes(damaged))
    assert read(bytes(SIZE)) is None and read(os.urandom(SIZE)) is None


RANK = """
import os, sys, time
from megatron.worker.beacon import Beacon
beacon = Beacon.inherited()
slot = beacon.group("k", "g", "0-1")
number = 0
while True:
    number += 1
    beacon.begin(number)
    beacon.at(3, number % 1000, number % 1000, str(number).encode() * 4)
    beacon.enter(slot, b"all_reduce", number); beacon.leave()
"""


def test_a_rank_that_is_stopped_at_any_moment_has_a_whole_place_and_a_running_one_gives_its_stack():
    memory, stacks = os.memfd_create("beacon"), os.memfd_create("stacks")
    os.ftruncate(memory, SIZE)
    shared = mmap.mmap(memory, SIZE)
    environment = {**os.environ, BEACON: str(memory), STACKS: str(stacks), "PYTHONPATH": str(ROOT)}
    rank = subprocess.Popen([sys.executable, "-c", RANK], env=environment, pass_fds=(memory, stacks))
    try:
        while read(shared) is None:
            assert rank.poll() is None
            time.sleep(0.01)
        draw, seen = random.Random(1), []
        for _ in range(60):
            time.sleep(draw.random() / 100)
            rank.send_signal(signal.SIGSTOP)
            place = read(shared)
            if place.phase == "forward":
                assert place.part == place.parts == place.step % 1000 and place.detail == str(place.step) * 4
            seen.append(place.step)
            rank.send_signal(signal.SIGCONT)
        assert seen == sorted(seen) and seen[-1] > seen[0]
        assert place.stacks
        rank.send_signal(signal.SIGRTMIN + 9)
        end = time.monotonic() + 300
        while b'File "<string>"' not in os.pread(stacks, 4096, 0) and time.monotonic() < end:
            time.sleep(0.01)
        assert b"most recent call first" in os.pread(stacks, 4096, 0)
        assert rank.poll() is None, "it is not disturbed"
    finally:
        rank.kill()
        rank.wait()
        os.close(memory)
        os.close(stacks)


@pytest.mark.parametrize("ranks", [(0,), (0, 1), (0, 2), (0, 1, 2, 3), (0, 4, 8, 12), (1, 5, 6), (0, 1, 4, 5, 8, 9)])
def test_ranks_as_text(ranks):
    assert ranks_of(ranks_text(ranks)) == list(ranks)
    assert ranks_of("0-99999999999") == ranks_of("x") == ranks_of("3-1:0") == []
