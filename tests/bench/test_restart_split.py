"""bench/launch/restart.py: the parts of a start sum to the whole."""

from __future__ import annotations

import pytest

from bench.launch.restart import PARTS, split


def test_parts_sum_to_the_whole() -> None:
    names = ["imports", "joining", "setup", "opening the data", "building the model and the engine"]
    names += ["reading the checkpoint", "setup", "data", "hooks", "forward", "data", "end"]
    marks = [[name, 100.0 + at * at, 0.5 * at] for at, name in enumerate(names)]
    parts = split(marks)
    assert list(parts) == list(PARTS.values())
    assert parts["joining the other ranks"] == (9 - 1, 1.0), "what is no part of its own belongs to the one before"
    assert sum(clock for clock, _ in parts.values()) == pytest.approx(marks[-1][1] - 100.0)
    assert sum(processor for _, processor in parts.values()) == pytest.approx(marks[-1][2])
    del marks[5]
    assert PARTS["reading the checkpoint"] not in split(marks), "a start that reads none"
