"""State of a rank as an agent reads it: how long it may stay in a phase, and what it called last."""

from __future__ import annotations

import mmap
import time

import pytest

from megatron.config.sections.output import WatchSection
from megatron.launch.agent.rank_probe import Sight, limit
from megatron.worker.beacon import OPTIMIZER, REDUCE, SIZE, Beacon, RankProgress, read

LIMITS = {name: value for name, value in WatchSection().model_dump().items() if isinstance(value, float)}
NEVER = float("inf")


def place(phase: str, longest: dict[str, float], done: int = 9) -> RankProgress:
    return RankProgress(1, False, 9, done, phase, 0, 0, "", 0.0, longest, [])


@pytest.mark.parametrize(
    ("phase", "longest", "done", "seconds"),
    [
        ("forward", {}, 9, 180.0),
        ("forward", {"forward": 20.0, "backward": 900.0}, 9, 180.0),
        ("forward", {"forward": 50.0}, 9, 250.0),  # a large model needs no other setting than a toy
        ("data", {"data": 10.0}, 9, 300.0),
        ("hooks", {}, 9, 900.0),
        ("evaluate", {"evaluate": 400.0}, 9, 2000.0),
        ("save", {}, 9, 1800.0),
        ("end", {}, 9, 1800.0),
        ("setup", {}, 0, 1800.0),
        ("forward", {}, 1, 1800.0),  # the first two steps compile
        ("forward", {}, 2, 180.0),
    ],
)
def test_a_phase_may_take_a_multiple_of_what_it_took_and_at_least_its_own_limit(phase, longest, done, seconds):
    assert limit(place(phase, longest, done), LIMITS) == seconds
    assert limit(place(phase, longest, done), {}) == NEVER, "nothing is watched"


def test_the_first_two_steps_teach_nothing():
    """The longest stay in a phase that a rank reports is the time of its later steps."""
    memory = mmap.mmap(-1, SIZE)
    beacon, longest = Beacon(memory), []
    for step, seconds in enumerate((0.2, 0.2, 0.02, 0.05, 0.01, 0.01)):
        beacon.begin(step)
        beacon.at(REDUCE)
        time.sleep(seconds)
        beacon.at(OPTIMIZER)
        beacon.done()
        longest.append(read(memory).longest.get("reduce", 0.0))
    assert longest[:2] == [0.0] * 2 and 0.02 <= longest[2] < longest[3]
    assert 0.05 <= longest[3] <= longest[4] <= longest[5]


def test_imports_that_do_not_end_are_late_where_the_script_would_say_something():
    sight = Sight(3)
    try:
        assert not sight.late({**LIMITS, "start": 60.0}) and not sight.late(LIMITS), "scripts of users say nothing"
        sight.born -= 61.0
        assert sight.late({**LIMITS, "start": 60.0}) and not sight.late(LIMITS)
        told = sight.tell(77, True, {**LIMITS, "start": 60.0})
        assert (told["phase"], told["limit"]) == ("", 60.0) and told["age"] > 61.0
    finally:
        sight.close()


def test_of_a_rank_that_has_ended_the_last_call_is_told():
    sight = Sight(3)
    try:
        beacon = Beacon(sight.memory)
        assert sight.last(77)["calls"] == [], "it never called anything"
        data, world = beacon.group("d", "the data group", "1,3"), beacon.group("w", "the group of all ranks", "0-3")
        beacon.begin(5)
        for slot, elements in ((world, 8), (data, 9)):
            beacon.enter(slot, b"all_reduce", elements)
            beacon.leave()
        told = sight.last(77)
        (call,) = told["calls"]
        assert (told["rank"], told["state"], told["step"]) == (3, "ended", 5)
        assert (call["name"], call["elements"], call["number"], call["inside"]) == ("the data group", 9, 1, True)
    finally:
        beacon._words.release()
        sight.close()
