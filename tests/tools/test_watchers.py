"""tools/bench/watchers.py: which steps are watched, and what its shares are."""

from __future__ import annotations

import pytest

from tools.bench.watchers import BLOCK, EMPTY, MODES, OFF, ON, TIMED, WARM, WatcherCost, mode, parts_of, shares


def test_blocks_take_turns_and_change_their_order() -> None:
    order = [mode(step) for step in range(0, 2 * len(MODES) * BLOCK, BLOCK)]
    assert order == [OFF, ON, TIMED, EMPTY, ON, TIMED, EMPTY, OFF]
    assert all(mode(step) == mode(step - step % BLOCK) for step in range(8 * BLOCK))


def test_hashes_count_as_often_as_they_are_taken() -> None:
    """Watchers of 0.2 s a block and hashes of 1 s beside them, on blocks of 10 s, over two ranks."""
    order = [mode(step) for step in range(0, WARM + 2 * len(MODES) * BLOCK, BLOCK)]
    rank = [[now, 5.0 + 0.6 * (now == ON), 0.5 * (now == ON)] for now in order]
    rank[0][1] = 99.0  # of the first steps
    assert shares([rank, rank], BLOCK) == pytest.approx([0.12, 0.12])
    assert shares([rank, rank], 10 * BLOCK) == pytest.approx([0.03, 0.03])


def test_a_call_that_is_timed_still_does_what_it_did() -> None:
    times = iter([0.0, 5.0, 5.0, 6.0, 10.0, 10.5])
    part, clock = WatcherCost(), lambda: next(times)
    assert part.timed(max, clock)(3, 4) == 4 and part.timed(min, clock)(3, 4) == 3
    part.timed(print, clock, -1)(end="")
    assert part.taken() == [5.5, 2] and part.taken() == [0.0, 0]


def test_parts_are_medians_of_steps_or_blocks_beyond_empty_ones() -> None:
    """Two ranks; an interrupt of a second fell into one step of either kind."""
    watch = {TIMED: [[0.5, 20], [1.5, 20], [0.6, 20]], EMPTY: [[0.1, 20], [0.1, 20], [9.0, 20]]}
    hashes = {TIMED: [[4.0, 1], [4.0, 1], [5.0, 1]], EMPTY: [[0.0, 0], [0.0, 0], [0.0, 0]]}
    parts = parts_of([{"watch": watch, "training.hashes": hashes}] * 2, 10 * BLOCK)
    assert parts["watch"] == {"seconds": pytest.approx(1.0), "calls": 40.0}
    assert parts["training.hashes"]["seconds"] == pytest.approx(8.0 / (10 * BLOCK)), "one in so many steps"
