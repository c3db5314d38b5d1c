"""tools/bench/watchers.py: which steps are watched, and what its shares are."""

from __future__ import annotations

import pytest

from tools.bench.watchers import BLOCK, WARM, is_on, shares


def test_blocks_take_turns_and_change_their_order() -> None:
    order = [is_on(step) for step in range(0, 8 * BLOCK, BLOCK)]
    assert order == [False, True, True, False, False, True, True, False]
    assert all(is_on(step) == is_on(step - step % BLOCK) for step in range(8 * BLOCK))


def test_hashes_count_as_often_as_they_are_taken() -> None:
    """Watchers of 0.2 s a block and hashes of 1 s beside them, on blocks of 10 s, over two ranks."""
    order = [is_on(step) for step in range(0, WARM + 4 * BLOCK, BLOCK)]
    rank = [[on, 5.0 + 0.6 * on, 0.5 * on] for on in order]
    rank[0][1] = 99.0  # of the first steps
    assert shares([rank, rank], BLOCK) == pytest.approx([0.12, 0.12])
    assert shares([rank, rank], 10 * BLOCK) == pytest.approx([0.03, 0.03])
