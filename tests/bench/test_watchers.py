"""bench/launch/watchers.py: which steps are watched, and what its shares are."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch.distributed as dist

from bench.launch.watchers import (
    BLOCK,
    EMPTY,
    HASHES,
    NONE,
    OFF,
    ON,
    ROUND,
    TIMED,
    WARM,
    WINDOW,
    SilentBeacon,
    WatcherCost,
    added,
    differences,
    parts_of,
    plan,
    trimmed,
    weights_of,
    wrapped_by_watch,
)
from megatron.parallel.messages.watched import watched_collectives
from megatron.worker.beacon import SETUP, Beacon


def test_of_each_pair_one_step_is_off_and_both_orders_come() -> None:
    steps = plan(100, 3)
    assert steps == plan(100, 3), "all ranks draw alike"
    pairs = [tuple(steps[at : at + 2]) for at in range(len(WARM), len(WARM) + 2 * 100 * len(ROUND), 2)]
    assert all(pair.count(OFF) == 1 for pair in pairs)
    assert Counter(kind for pair in pairs for kind in pair if kind != OFF) == {
        kind: 100 * ROUND.count(kind) for kind in ROUND
    }
    assert 0.45 < sum(pair[0] == OFF for pair in pairs) / len(pairs) < 0.55
    assert steps[-6 * BLOCK - 1 : -1] == ([TIMED] * BLOCK + [EMPTY] * BLOCK) * 3


def test_what_is_added_is_found_below_a_load_that_comes_and_goes() -> None:
    """Steps of 10 ms whose speed wanders by a half. Watchers add 50 µs, and hashes 2 ms every 100 steps: 0.7 %."""
    steps, draw, spread = plan(400, 2), np.random.default_rng(7), 0.02
    wander = 1 + 0.5 * np.sin(np.arange(len(steps)) / 300)
    more = {OFF: 0.0, NONE: 0.0, HASHES: 2.05e-3}
    seconds = [
        slow * 0.01 * draw.normal(1, spread) + more.get(kind, 50e-6) + (draw.random() < 0.01) * 0.05
        for slow, kind in zip(wander, steps)
    ]
    kinds, off = differences(steps, seconds)

    def width(pairs: int) -> float:  # of the interval of a mean of normal differences. A trimmed one has a little more
        return 1.3 * 2 * 1.96 * spread * (2 / pairs) ** 0.5

    assert [len(kinds[kind]) for kind in (ON, NONE, HASHES)] == [400 * ROUND.count(k) for k in (ON, NONE, HASHES)]
    middle, low, high = added(kinds, off, weights_of(10, 100))
    assert low < 0.007 < high and low < middle < high and high - low < width(len(kinds[ON])) < 0.002
    middle, low, high = added(kinds, off, {NONE: 1.0})
    assert low < 0 < high and high - low < width(len(kinds[NONE]))


def test_rare_steps_count_as_often_as_they_come() -> None:
    weights = weights_of(10, 100)
    assert weights == pytest.approx({ON: 0.89, WINDOW: 0.1, HASHES: 0.01})
    each = {ON: 1.0, WINDOW: 4.0, HASHES: 101.0}
    kinds = {kind: np.full(6, value) for kind, value in each.items()}
    assert added(kinds, np.full(18, 10.0), weights) == pytest.approx([0.23] * 3)


def test_an_interrupt_changes_no_trimmed_mean() -> None:
    assert trimmed(np.array([3.0, 1.0, 2.0, 9e9, -9e9])) == 2.0
    assert trimmed(np.array([1.0, 2.0])) == 1.5, "too few to leave one out"


def test_a_beacon_is_silent_and_speaks_again() -> None:
    beacon = Beacon()
    beacon.at(SETUP)
    before = bytes(beacon._memory)
    beacon.__class__ = SilentBeacon
    beacon.begin(1)
    assert beacon.tells_of(4) is False
    for call in (lambda: beacon.at(3), lambda: beacon.enter(1, b"all_reduce", 4), beacon.leave, beacon.done):
        call()
    beacon.wait(1)
    assert bytes(beacon._memory) == before
    beacon.__class__ = Beacon
    beacon.begin(2)
    assert bytes(beacon._memory) != before


def test_what_is_around_collectives_is_found() -> None:
    plain = dist.all_reduce, dist.Work.wait
    assert wrapped_by_watch() == []
    with watched_collectives(Beacon()):
        found = {(where, name): function for where, name, function in wrapped_by_watch()}
        assert found[dist, "all_reduce"].__wrapped__ is plain[0] and found[dist.Work, "wait"].__wrapped__ is plain[1]
        assert found[dist.distributed_c10d, "all_reduce"] is dist.all_reduce
    assert (dist.all_reduce, dist.Work.wait) == plain


def test_a_call_that_is_timed_still_does_what_it_did() -> None:
    times = iter([0.0, 5.0, 5.0, 6.0, 10.0, 10.5])
    part, clock = WatcherCost(), lambda: next(times)
    assert part.timed(max, clock)(3, 4) == 4 and part.timed(min, clock)(3, 4) == 3
    part.timed(print, clock, -1)(end="")
    assert part.taken() == [5.5, 2] and part.taken() == [0.0, 0]


def test_parts_are_medians_of_steps_or_blocks_beyond_empty_ones() -> None:
    """Two ranks. An interrupt of a second fell into one step of either kind."""
    watch = {TIMED: [[0.5, 20], [1.5, 20], [0.6, 20]], EMPTY: [[0.1, 20], [0.1, 20], [9.0, 20]]}
    hashes = {TIMED: [[4.0, 1], [4.0, 1], [5.0, 1]], EMPTY: [[0.0, 0], [0.0, 0], [0.0, 0]]}
    parts = parts_of([{"watch": watch, "training.hashes": hashes}] * 2, 10 * BLOCK)
    assert parts["watch"] == {"seconds": pytest.approx(1.0), "calls": 40.0}
    assert parts["training.hashes"]["seconds"] == pytest.approx(8.0 / (10 * BLOCK)), "one in so many steps"
