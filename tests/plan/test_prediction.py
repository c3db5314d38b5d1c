"""The prediction at the start of a run, and its correction by earlier runs."""

from __future__ import annotations

import contextlib
import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.config import load, resolve
from megatron.plan import prediction
from megatron.plan.devices import cluster
from megatron.plan.prediction import HistoryEntry, Need, correction, errors, predict, read_history, remember, span
from megatron.plan.search import Question
from tests.paths import ROOT
from tests.training.matrix import cases
from tests.training.test_run import job
from tests.workers import run
from tools.plan import main

RUN = HistoryEntry("cpu", "fp32", ("attention", "mlp"), 2, "t1 p1 zero1 mb2 none", Need(1.0, 1e9), Need(1.0, 1e9))


@pytest.fixture
def state(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "deepy" / "predictions.jsonl"


def took(seconds: float, memory: float, **change) -> HistoryEntry:
    return replace(RUN, measured=Need(seconds, memory), **change)


def test_the_formulas_are_those_of_the_search(state):
    """The run's own layout, judged by the search that checks all of them."""
    words = ["parallel.tensor=2", "training.micro_batch_size=4", "training.global_batch_size=64", "precision=bf16"]
    file = str(ROOT / "configs/pythia/160m.yml")
    config = load([file], words, ranks=8, check_inputs=False).config
    found = predict(config, 8, "NVIDIA H100 80GB HBM3", 8)
    question = Question.of([file], words, cluster(8, "h100"))
    plan = question.judge(prediction.choice_of(config))
    assert found.corrected == Need(plan.step.seconds, plan.memory.total) and found.runs == 0 and found.fits
    small = predict(config, 8, "NVIDIA H100 80GB HBM3", 8, capacity=2.0**28)
    assert not small.fits and "0 GiB" in small.text(10) and small.text(10).endswith(prediction.TOO_LARGE)
    near = replace(small, capacity=found.corrected.memory * 1.1)
    assert near.fits and near.text(10).endswith(prediction.CLOSE) and len(found.text(10).splitlines()) == 2
    large = replace(small, corrected=Need(1234.5, 2.0**37), capacity=2.0**38, runs=1000).text(10**6)
    assert max(map(len, [*large.splitlines(), prediction.CLOSE, prediction.TOO_LARGE])) <= 80, large
    slow = replace(found, corrected=Need(5400.0, 2.0**30)).text(100_000)
    assert "1.5 hours a step" in slow and "17.1 years for 100,000 steps" in slow and slow.endswith(prediction.LONG)
    assert predict(config, 8, "Some Other Device", 8) is None


@pytest.mark.layouts
def test_every_layout_has_a_prediction_or_none(state):
    """Layouts of the support matrix, whose configurations the rules accept."""
    made = 0
    grids = [each for each in cases() if "col" in each.layout]  # of each one architecture: all columns share formulas
    others = [each for each in cases() if "col" not in each.layout]
    chosen = {each.layout: each for each in grids} | {(each.architecture, each.layout): each for each in others}
    for case in chosen.values():
        config = resolve(case.values, ranks=case.ranks)
        found = predict(config, case.ranks, "cpu", case.ranks)
        folded = config.parallel.expert_tensor not in (None, config.parallel.tensor)
        assert (found is None) == folded, case.name
        made += found is not None and 0 < found.entry.predicted.seconds < 1e6
    assert made > 100


def test_errors_of_runs_alike_are_taken_away():
    slow = [took(3.0, 2e9), took(2.0, 1e9), took(4.0, 8e9)]
    assert correction(slow[:2], RUN) == (Need(1.0, 1.0), 0)
    factor, runs = correction(slow, RUN)
    assert (factor.seconds, factor.memory, runs) == (pytest.approx(3.0), pytest.approx(2.0), 3)
    for change in ({"device": "other"}, {"compute": "bf16"}, {"predicted": Need(9.0, 1e9)}):
        assert correction(slow, replace(RUN, **change))[1] == 0
    mamba = [took(10.0, 1e9, kinds=("mamba",)) for _ in range(4)]
    assert correction([*slow, *mamba], RUN)[0].seconds == pytest.approx(3.0)  # only its own kinds of layers
    assert correction(mamba, RUN)[0].seconds == pytest.approx(10.0)  # others, where there is nothing else
    found = errors([*slow, took(3.0, 2e9)])["cpu", "fp32"]
    assert (found.runs, found.corrections) == (4, 1) and found.alone.seconds == pytest.approx(2.0)
    assert found.corrected.seconds == pytest.approx(0.0, abs=1e-12)


def test_runs_on_the_same_layout_count_alone():
    """A run takes ten times the formulas on one layout, and half of them on another."""
    others = [took(0.5, 1e9, layout="t2 p1 zero1 mb2 none") for _ in range(5)]
    history = [*(took(10.0, 1e9) for _ in range(3)), *others]
    assert correction(history, RUN) == (Need(pytest.approx(10.0), pytest.approx(1.0)), 3)
    assert correction(history, replace(RUN, layout="t1 p2 zero0 mb2 none"))[0].seconds == pytest.approx(0.5)


def test_the_file_is_whoever_wrote_it(state):
    assert read_history() == []
    remember(RUN, Need(2.0, 3e9))
    good = json.loads(state.read_text())
    bad = [
        "not json", "[]", "{", json.dumps({**good, "measured": {"seconds": 0, "memory": 1}}), "[" * 5000,
        json.dumps({**good, "measured": {"seconds": math.nan, "memory": 1}}), json.dumps({**good, "ranks": "two"}),
    ]  # fmt: skip
    with state.open("a") as file:
        file.write("\n".join(bad) + "\n")
    remember(RUN, Need(4.0, 3e9))
    assert [each.measured.seconds for each in read_history()] == [2.0, 4.0]
    assert state.stat().st_mode & 0o077 == 0


def told(state: str, folder: str, *overrides: str) -> str:
    """On a rank: what a run prints that keeps its history below `state`."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.setenv("XDG_STATE_HOME", state)
        job(folder, 1, *overrides)
    return said.getvalue()


def test_a_run_tells_and_remembers(state, tmp_path):
    (tmp_path / "tiny.yml").write_text(f"extends: {ROOT / 'configs/test/tiny_neox.yml'}\n")
    said = []
    for name, steps in (("short", 12), ("long", 20), ("quiet", 20)):  # the first is too short to have a pace
        own = [f"training.steps={steps}", f"run.dir={tmp_path}/{name}", f"logging.predictions={name != 'quiet'}"]
        said += run(1, told, str(tmp_path), str(tmp_path), "checkpoint.every=null", *own)
    assert [text.count("(by formulas alone)") for text in said] == [1, 1, 0]
    assert all("s a step" not in text for text in said) and "time unknown until 3 runs" in said[1]
    (entry,) = read_history()
    records = [json.loads(line) for line in (tmp_path / "long" / "metrics.jsonl").read_text().splitlines()]
    paces = [each["step_seconds"] for each in records if each.get("step", 0) >= 3 and "loss" in each]
    assert len(paces) == 17 and entry.measured.seconds == sorted(paces)[8]
    assert (entry.device, entry.kinds, entry.ranks) == ("cpu", ("attention", "mlp"), 1)


def test_the_command_shows_the_error_so_far(state, capsys):
    assert main(["history"]) == 0 and "has no runs yet" in capsys.readouterr().out
    for seconds in (2.0, 2.0, 2.0, 2.2):
        remember(RUN, Need(seconds, 1e9))
    assert main(["history"]) == 0
    said = capsys.readouterr().out
    assert "4 runs, median error of a step 100%, of memory 0%" in said and "10% and 0% for the 1 that" in said
    assert main(["history", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["errors"][0]["corrections"] == 1


@pytest.mark.parametrize(("seconds", "said"), [(20, "20 seconds"), (600, "10.0 minutes"), (86400 * 11, "11.0 days")])
def test_spans(seconds, said):
    assert span(seconds) == said
