"""Times that are taken in rounds: their order, what a stopped table keeps, the verdict on the plan's first choice."""

from __future__ import annotations

import json
import math
import time
from types import SimpleNamespace

import pytest
import yaml

from bench.plan import plan_choice, plan_table
from bench.plan.plan_choice import COMMON, asked, key, result
from bench.plan.step_times import Rounds, round_of, seconds, spread
from bench.runner import run
from megatron.config import resolve
from megatron.plan.devices import known_devices
from megatron.plan.prediction import choice_of
from tests.training.matrix import cases

CASE = next(each for each in cases() if each.name == "fp32: neox on one, ZeRO 0")
LATER = time.monotonic() + 1e6


def test_rounds_take_every_case_in_turn_and_go_on(tmp_path):
    path, taken = tmp_path / "times.json", []

    def measure(name: str) -> dict[str, float]:
        taken.append(name)
        if name == "b" and len(taken) > 4:
            raise RuntimeError("worker 0\nValueError: b fails")
        return {"wall": float(len(taken)), "cpu": 1.0}

    def of(names: str) -> dict[str, dict[str, int]]:
        return {name: {"steps": 8} for name in names}

    Rounds(path, LATER).take(of("ab"), measure, 2)
    assert taken == ["a", "b", "a", "b"]
    rounds = Rounds(path, LATER)
    rounds.take(of("abc"), measure, 4)  # c is new, and b fails from here on
    assert taken[4:] == ["c", "c", "a", "b", "c", "a", "c"]
    assert rounds.found == json.loads(path.read_text()) and not rounds.whole("b", 3) and rounds.whole("b", 2)
    Rounds(path, time.monotonic() - 1.0).take(of("abcd"), measure, 9)
    assert len(taken) == 11


@pytest.mark.parametrize("known", ['{"a": [{"wall": 9.0, "cpu": 9.0}]}', None])
def test_rounds_of_other_settings_are_taken_anew(known, tmp_path):
    """Published runs without settings, too."""
    path, old, new = tmp_path / "times.json", {"steps": 2, "ranks": 2}, {"steps": 8, "ranks": 2}
    if known:
        path.write_text(known)
    else:
        Rounds(path, LATER).take({"a": old, "b": new}, lambda _: {"wall": 9.0, "cpu": 9.0}, 2)
    rounds = Rounds(path, LATER)
    rounds.take({"a": new, "b": new}, lambda _: {"wall": 1.0, "cpu": 1.0}, 2)
    assert [each["wall"] for each in rounds.whole("a", 2)] == [1.0, 1.0]
    assert [each["wall"] for each in rounds.whole("b", 2)] == ([1.0, 1.0] if known else [9.0, 9.0])
    assert json.loads(path.read_text())["a"]["settings"] == new


def test_a_failure_without_text_has_a_name(capsys):
    def measure(_name: str) -> dict[str, float]:
        raise TimeoutError

    rounds = Rounds(None, LATER)
    rounds.take({"a": {}}, measure, 2)
    assert capsys.readouterr().err == "a: TimeoutError\n" and not rounds.whole("a", 1)


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
    settings = {"ranks": 2, "steps": 8, "overrides": COMMON}
    rounds.take(dict.fromkeys(times, settings), lambda name: {"wall": times[name], "cpu": times[name]}, 1)
    assert result("llama", plans, rounds, 1, "wall")["first_is_slower_by"] == 0.0
    assert result("llama", plans, rounds, 2, "wall")["first_is_slower_by"] is None
    rounds.whole(key("llama", plans[3]), 1)[0]["wall"] = 0.008
    rounds.keep()
    assert result("llama", plans, rounds, 1, "wall")["first_is_slower_by"] == pytest.approx(0.25)
    words = ["--cases", "llama", "--rounds", "1", "--output", str(rounds.path), "--minutes", "0"]
    assert run("plan_choice", [*words, "--clock", "cpu"]) == 0 and run("plan_choice", words) == 1
    assert "the first is 25.0% slower than the best" in capsys.readouterr().out
    assert run("plan_choice", [*words, "--clock", "cpu", "--steps", "4"]) == 1, "those are of 8 steps"
    assert f"{len(plans)} not measured" in capsys.readouterr().out


@pytest.mark.parametrize("missing", ["first", "last"])
def test_a_comparison_that_lacks_a_time_has_not_succeeded(options, missing, tmp_path, monkeypatch, capsys):
    """As where the plan's first choice fails: the others say nothing of it."""
    _, plans = asked("llama", options)
    without = str(plans[0 if missing == "first" else -1].choice)

    def measured(config, *_):
        if str(choice_of(config)) == without:
            raise RuntimeError("it fails")
        return {"wall": 1.0, "cpu": 1.0}

    monkeypatch.setattr(plan_choice, "round_of", measured)
    assert run("plan_choice", ["--cases", "llama", "--rounds", "1"]) == 1
    assert "1 not measured" in capsys.readouterr().out
    assert run("plan_choice", ["--cases"]) == 1, "nothing was compared"


@pytest.mark.tour
def test_a_table_that_lacks_a_row_has_not_succeeded(tmp_path, monkeypatch, capsys):
    def measured(config, *_):
        if config.zero.stage:
            raise RuntimeError
        return {"wall": 0.5, "cpu": 0.25}

    monkeypatch.setattr(plan_table, "round_of", measured)
    chosen = [case for case in cases() if case.ranks == 1 and case.architecture == "neox"]
    stages = {resolve(case.values, ranks=1).zero.stage: case for case in chosen}
    monkeypatch.setattr(plan_table, "chosen", lambda *_: [stages[0], stages[1]])
    words = ["--times", "--rounds", "1", "--json", str(tmp_path / "times.json")]
    assert run("plan_table", [*words, "--only", stages[0].name]) == 0
    assert run("plan_table", words) == 1
    told = capsys.readouterr()
    assert f"1 of 2 runs have no row: {stages[1].name}" in told.err and stages[0].name in told.out


def test_rows_of_memory_are_kept_for_the_same_device(tmp_path, monkeypatch):
    """Another entry of the same name is another device."""
    monkeypatch.setattr(plan_table, "chosen", lambda *_: [CASE])
    monkeypatch.setattr(plan_table, "memory_row", lambda *_: {"measured": next(sizes), "rehearsed": 1, "planned": 1})
    sizes, file = iter((1024, 2048, 4096)), tmp_path / "rows.json"
    entry = known_devices()[0]["cpu"].model_dump()

    def size(launch: float) -> int:
        machine = tmp_path / f"{launch}.yml"
        machine.write_text(yaml.safe_dump({"devices": {"mine": {**entry, "launch": launch}}}))
        assert run("plan_table", ["--json", str(file), "--device", "mine", "--machine", str(machine)]) == 0
        return json.loads(file.read_text())[0]["measured"]

    assert [size(5.0), size(5.0), size(6.0), size(6.0)] == [1024, 1024, 2048, 2048]


def test_on_a_cpu_hooks_of_zero_3_are_counted(options):
    """By only the formulas of the device it was the first choice everywhere, and measured it is twice as slow."""
    for name in ("llama", "neox", "mixtral", "mamba2", "rwkv7"):
        _, plans = asked(name, options)
        assert plans[0].choice.zero < 3 and plans[0].step.parts["hooks"] < plans[-1].step.parts["hooks"]
