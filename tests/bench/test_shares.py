"""Where the time of a step goes: shares of operations, of all contenders in one table."""

from __future__ import annotations

import json

import pytest

from bench.step.shares import OUTSIDE, shares, table
from tests.paths import ROOT
from tests.scripts import forked


def column(contender: str, seconds: dict[str, float]) -> dict:
    return {"shape": "tiny", "precision": "fp32", "contender": contender, "seconds": seconds}


def test_shares_are_of_the_whole_step():
    assert shares({"aten::mm": 0.3, OUTSIDE: 0.1}) == pytest.approx({"aten::mm": 0.75, OUTSIDE: 0.25})


def test_small_operations_are_added_up():
    """An operation is small if it is so in every column."""
    ours = {"aten::mm": 0.90, "aten::add": 0.015, "aten::mul": 0.005, OUTSIDE: 0.08}
    theirs = {"aten::mm": 1.0, "aten::add": 0.4, "aten::mul": 0.02, "aten::cat": 0.02, OUTSIDE: 0.56}
    text = table([column("ours", ours), column("eager", theirs)])
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert lines[0] == ["operation", "tiny, fp32, ours", "tiny, fp32, eager"]
    assert lines[2:] == [
        ["`mm`", "90.0%", "50.0%"],
        ["`add`", "1.5%", "20.0%"],
        ["others", "0.5%", "2.0%"],
        [OUTSIDE, "8.0%", "28.0%"],
        ["a step", "1 s", "2 s"],
    ]


@pytest.mark.tour
def test_of_a_real_step():
    words = ("--shapes", "tiny", "--precision", "fp32", "--sequence", "32", "--vocabulary", "256", "--steps", "2")
    program = ROOT / "bench" / "__main__.py"
    done = forked(program, "shares", *words, "--json", folder=ROOT, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout.strip().splitlines()[-1])
    seconds = found["seconds"]
    assert found["contender"] == "ours" and seconds["aten::addmm"] > 0 and seconds["aten::mm"] > 0
    assert 0 < seconds[OUTSIDE] < sum(seconds.values())  # no time is counted twice
