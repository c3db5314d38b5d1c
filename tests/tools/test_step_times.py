"""Times that are taken in rounds: their order, what a stopped table keeps, the verdict on the plan's first choice."""

from __future__ import annotations

import json
import math
import time
from types import SimpleNamespace

import pytest

from megatron.config import resolve
from tests.training.matrix import cases
from tools.bench.plan_choice import asked, key, main, result
from tools.bench.step_times import Rounds, round_of, seconds, spread

CASE = next(each for each in cases() if each.name == "fp32: neox on one, ZeRO 0")
LATER = time.monotonic() + 1e6


def test_rounds_take_every_case_in_turn_and_go_on(tmp_path):
    path, taken = tmp_path / "times.json", []

    def measure(name: str) -> dict[str, float]:
        taken.append(name)
        if name == "b" and len(taken) > 4:
            raise RuntimeError("worker 0\nValueError: b fails")
        return {"wall": float(len(taken)), "cpu": 1.0}

    Rounds(path, LATER).take("ab", measure, 2)
    assert taken == ["a", "b", "a", "b"]
    rounds = Rounds(path, LATER)
    rounds.take("abc", measure, 4)  # c is new, and b fails from here on
    assert taken[4:] == ["c", "c", "a", "b", "c", "a", "c"]
    assert rounds.found == json.loads(path.read_text()) and not rounds.whole("b", 3) and rounds.whole("b", 2)
    Rounds(path, time.monotonic() - 1.0).take("abcd", measure, 9)
    assert len(taken) == 11


def test_a_time_is_the_median_of_its_rounds():
    found = [{"wall": each, "cpu": 1.0} for each in (2.0, 9.0, 3.0)]
    assert seconds(found, "wall") == 3.0 and spread(found, "wall") == 3.5 and spread(found, "cpu") == 0.0


def test_steps_of_a_real_engine():
    found = round_of(resolve(CASE.values, ranks=1), 1, 2)
    assert found.keys() == {"wall", "cpu"} and all(0 < each < 60 and math.isfinite(each) for each in found.values())


@pytest.fixture
def options() -> SimpleNamespace:
    return SimpleNamespace(ranks=2, device="cpu", machine=None)


def test_the_first_choice_beside_the_best(options, tmp_path, capsys):
    _, plans = asked("llama", options)
    rounds = Rounds(tmp_path / "choice.json", LATER)
    times = {key("llama", plan): 0.010 + 0.001 * place for place, plan in enumerate(plans)}
    rounds.take([*times], lambda name: {"wall": times[name], "cpu": times[name]}, 1)
    assert result("llama", plans, rounds, 1, "wall")["first_is_slower_by"] == 0.0
    assert result("llama", plans, rounds, 2, "wall")["first_is_slower_by"] is None
    rounds.found[key("llama", plans[3])][0]["wall"] = 0.008
    rounds.keep()
    assert result("llama", plans, rounds, 1, "wall")["first_is_slower_by"] == pytest.approx(0.25)
    words = ["--cases", "llama", "--rounds", "1", "--output", str(rounds.path), "--minutes", "0"]
    assert main([*words, "--clock", "cpu"]) == 0 and main(words) == 1
    assert "the first is 25.0% slower than the best" in capsys.readouterr().out


def test_on_a_cpu_hooks_of_zero_3_are_counted(options):
    """By the formulas of the device alone it was the first choice everywhere, and measured it is twice as slow."""
    for name in ("llama", "neox", "mixtral", "mamba2", "rwkv7"):
        _, plans = asked(name, options)
        assert plans[0].choice.zero < 3 and plans[0].step.parts["hooks"] < plans[-1].step.parts["hooks"]
