"""checkpoint.auto: how often a run saves, by what saves cost and how often it fails."""

from __future__ import annotations

import json
from math import expm1, sqrt
from pathlib import Path

import pytest

from megatron.checkpoint.save.policy import reason_to_save
from megatron.config.sections.output import CheckpointSection
from megatron.report.ledger import best_interval, read_ledger
from megatron.training.hooks.checkpoint import FIRST, LEAST, Interval
from tests.training.settings import settings
from tests.training.toy import run, toy_trainer


def waste(every: float, save: float, between: float) -> float:
    """Time lost per time of work, with the failures of a Poisson process: by summing over when they come."""
    expected = between * expm1((every + save) / between)  # until a stretch of work and its save are through
    return expected / every - 1


@pytest.mark.parametrize(("save", "between"), [(30.0, 3.09 * 3600), (2.0, 3.09 * 3600), (100.0, 1000.0)])
def test_no_other_interval_loses_less(save: float, between: float) -> None:
    best = best_interval(save, between)
    least = min(waste(best * factor / 100, save, between) for factor in range(20, 500))
    assert waste(best, save, between) <= least * 1.002
    assert best < sqrt(2 * save * between)


@pytest.mark.parametrize("save", [0.05, 2.0, 30.0])
def test_saves_take_less_than_a_hundredth_where_failures_are_5000_of_them_apart(save: float) -> None:
    """Young's share is sqrt(save / (2 between)). Oftener, a smaller share would lose more than it spares."""
    for more in (1.0, 3.0, 100.0):
        between = 5000 * more * save
        share = save / (best_interval(save, between) + save)
        assert share <= 0.01 and share == pytest.approx(sqrt(save / (2 * between)), rel=0.02)
    assert save / best_interval(save, 4000 * save) > 0.01


def ledger(folder: Path, failures: int, stall: float) -> None:
    spent = {"since": 0.0, "attempt": 0, "completed": 5, "start": 0.0, "evaluation": 0.0, "save": stall, "end": 0.0}
    entries = [{"event": "checkpoint", "stall_seconds": stall, "spent": {**spent, "steps": 36000.0 - stall}}]
    for number in range(failures):
        at = 36000.0 + number
        entries.append({"event": "restart", "since": at, "failed": at, "ended": at, "attempt": number + 1})
    folder.mkdir()
    (folder / "ledger.jsonl").write_text("".join(json.dumps(each) + "\n" for each in entries))


def test_failures_and_costs_of_earlier_starts_count(tmp_path: Path) -> None:
    found = {}
    for name, failures, stall in (("rare", 0, 4.0), ("often", 8, 4.0), ("dear", 8, 16.0)):
        ledger(tmp_path / name, failures, stall)
        found[name] = Interval(settings(run={"dir": str(tmp_path / name), "name": name}), 16_384).seconds(0.0)
    prior = 3600 * 50_700 / 16_384
    assert found["rare"] == pytest.approx(best_interval(4.0, prior + 36000.0))
    assert found["often"] == pytest.approx(best_interval(4.0, (prior + 36007.0) / 9), rel=1e-3)
    assert found["often"] < found["rare"] and found["often"] < found["dear"]
    new = Interval(settings(run={"dir": str(tmp_path / "new"), "name": "new"}), 16_384)
    assert new.seconds(0.0) == FIRST
    new.saved(1e-9)
    assert new.seconds(0.0) == LEAST


def test_a_run_saves_when_the_interval_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of a minute per look. The first save after FIRST seconds, then by what the toy's saves cost (0.5 s)."""
    monkeypatch.setattr("megatron.training.hooks.checkpoint.DEVICE_HOURS", 10.0)
    config = settings(
        60, run={"dir": str(tmp_path), "name": "run"}, logging={"console": "quiet", "curve": False},
        checkpoint={"auto": True, "at_end": False},
    )  # fmt: skip
    trainer = toy_trainer(config)
    monkeypatch.setattr(type(trainer.clock), "total", property(lambda clock: 60.0 * trainer.completed))
    assert run(trainer).finished
    saves = [
        (each["step"], each["reason"])
        for each in read_ledger(tmp_path / "ledger.jsonl")
        if each["event"] == "checkpoint"
    ]
    assert saves[0][0] == 6 and {reason for _, reason in saves} == {"the interval that loses least time"}
    gaps = {later - earlier for (earlier, _), (later, _) in zip(saves[:-1], saves[1:])}
    wanted = best_interval(0.5, 36000.0) / 60  # steps. It takes one more until the signal is known
    assert gaps <= {int(wanted) + 1, int(wanted) + 2}, (gaps, wanted)


def test_without_it_nothing_is_saved_by_time() -> None:
    never, auto = CheckpointSection(), CheckpointSection(auto=True)
    assert reason_to_save(never, 5, time_is_up=True) is None and reason_to_save(auto, 5) is None
    assert reason_to_save(auto, 5, time_is_up=True) == "the interval that loses least time"
