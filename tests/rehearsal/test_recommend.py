"""The recommended layouts: every ready configuration has a row that is current, and that was rehearsed and fits."""

from __future__ import annotations

import json

import pytest

from megatron.plan.devices import cluster
from megatron.plan.search import Question
from megatron.rehearsal.recommend import GPU, SIZES, best, digest, found, name_of, page, ready, whole
from tests.paths import ROOT
from tests.plan.test_search import LLAMA, question

CONFIGS, PAGE = ROOT / "configs", ROOT / "docs" / "recommended_layouts.md"
ROWS = json.loads(PAGE.with_suffix(".json").read_text(encoding="utf-8"))
PATHS = {name_of(path, CONFIGS): path for path in ready(CONFIGS)}
ANEW = "`python tools/plan.py recommend` writes the page anew"


def test_every_configuration_has_a_row_of_its_own_files():
    assert {name: row["digest"] for name, row in ROWS.items()} == {
        name: digest(path) for name, path in PATHS.items()
    }, ANEW
    assert PAGE.read_text(encoding="utf-8") == page(ROWS), ANEW


def test_every_recommended_layout_fits():
    device = cluster(8, GPU).device
    for name, row in ROWS.items():
        for own in (row[str(devices)] for devices in SIZES):
            if whole(row):
                assert "none" in own or 0 < own["rehearsed"] <= device.bytes, name
            else:  # the page says so
                assert own.get("planned", 0) <= device.bytes, name


@pytest.mark.parametrize("name", ["pythia/14m"])
def test_a_row_is_current(name):
    assert_same(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", PATHS)
def test_rows_are_current(name):
    assert_same(name)


def assert_same(name: str) -> None:
    """All of a row is found again, but what it took."""
    again = found(PATHS[name], formulas=not whole(ROWS[name]))
    for row in (again, kept := json.loads(json.dumps(ROWS[name]))):
        for devices in SIZES:
            for key in ("processor_seconds", "process"):
                row[str(devices)].pop(key, None)
    assert again == kept, ANEW


def test_a_layout_that_does_not_rehearse_is_passed_over(monkeypatch):
    """And with it those that the same excess would not let fit."""
    asked, tried = question(LLAMA), []
    size = asked.at.device.bytes

    def told(asked: Question, choice) -> dict:
        tried.append(choice)
        return {"rehearsed": size + 1 if len(tried) == 1 else 1, "processor_seconds": 1.0, "process": 1}

    monkeypatch.setattr("megatron.rehearsal.recommend.rehearsed", told)
    own = best(asked)
    plans = [plan.choice for plan in asked.answers().plans]
    assert tried[0] == plans[0] and len(own["tried"]) == 1 and own["layout"] == vars(tried[1])
    assert own["planned"] < asked.judge(plans[0]).memory.total
