"""The recommended layouts: every ready configuration has a row that is current, and that was rehearsed and fits."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest

from megatron.plan.candidate import RECOMPUTE, Candidate
from megatron.plan.devices import cluster
from megatron.plan.memory import TIGHT
from megatron.plan.search import Plan, Question
from megatron.rehearsal.recommend import GPU, SIZES, TRIES, best, digest, forms, found, name_of, page, ready, whole
from tests.paths import ROOT
from tests.plan.test_search import LLAMA, question

CONFIGS, PAGE = ROOT / "configs", ROOT / "docs" / "recommended_layouts.md"
ROWS = json.loads(PAGE.with_suffix(".json").read_text(encoding="utf-8"))
PATHS = {name_of(path, CONFIGS): path for path in ready(CONFIGS)}
ANEW = "`python tools/plan.py recommend` writes the page anew"


@cache
def _llama() -> Question:
    return question(LLAMA)


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


@pytest.mark.tour
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
    """And with it the layouts that the same excess would not let fit."""
    asked, tried = _llama(), []
    size = asked.at.device.bytes

    def told(asked: Question, choice) -> dict:
        tried.append(choice)
        return {"rehearsed": size + 1 if len(tried) == 1 else 1, "processor_seconds": 1.0, "process": 1}

    monkeypatch.setattr("megatron.rehearsal.recommend.rehearsed", told)
    own = best(asked)
    first = asked.judge(tried[0])
    assert first.choice == asked.answers().plans[0].choice and len(own["tried"]) == 1
    assert own["layout"] == vars(tried[1])
    assert tried[1].recompute != "none" or own["planned"] < first.memory.total


@pytest.mark.parametrize("worth", [True, False])
def test_what_rehearses_outranks_what_has_more_room_where_it_is_much_faster(monkeypatch, worth: bool):
    """A layout near the limit is passed over only for one that is nearly as fast."""
    asked = _llama()
    size = asked.answers().plans[0].memory.total / 0.95
    tight = asked.on(replace(asked.at, device=asked.at.device.model_copy(update={"memory": size / 2**30})))
    plans = list(forms(tight, tight.answers()))
    near, roomy = (
        min((each for each in plans if (each.share > TIGHT) is close), key=lambda plan: plan.step.seconds)
        for close in (True, False)
    )
    gain = roomy.step.seconds / near.step.seconds
    assert gain > 1

    def told(asked: Question, choice: Candidate) -> dict:
        return {"rehearsed": asked.judge(choice).memory.total, "processor_seconds": 1.0, "process": 1}

    monkeypatch.setattr("megatron.rehearsal.recommend.rehearsed", told)
    monkeypatch.setattr("megatron.plan.search.WORTH", gain * (0.99 if worth else 1.01))
    own = best(tight)
    assert own["tried"] == [] and own["layout"] == best(tight, formulas=True)["layout"]
    assert own["layout"] == vars((near if worth else roomy).choice)


def truth(plan: Plan, factors: dict[str, float]) -> float:
    """Bytes in a world where a micro-batch takes a multiple of the formulas, by the mode of recomputation."""
    return plan.memory.total + (factors[plan.choice.recompute] - 1) * passing(plan)


def passing(plan: Plan) -> float:
    return sum(plan.memory.parts[name] for name in ("activations", "working", "loss"))


@pytest.mark.parametrize("fits", [True, False])
def test_the_search_goes_on_where_formulas_see_a_fraction(monkeypatch, fits):
    """Of all layouts with all modes of recomputation, only the ones of least memory fit, or not even these. Formulas
    ask for no recomputation at all here, and what they propose first runs out by far."""
    asked, tried = _llama(), []
    size = asked.at.device.bytes
    every = [
        asked.judge(replace(plan.choice, recompute=mode))
        for plan in asked.answers().plans
        for mode in RECOMPUTE
        if mode != "selective" or not plan.choice.passes_weights
    ]
    least = min(passing(each) for each in every if each.choice.recompute == "full")
    factors = {"none": 1e6, "selective": 1e5, "full": (0.9 if fits else 1.1) * size / least}

    def told(asked: Question, choice: Candidate) -> dict:
        tried.append(choice)
        return {"rehearsed": truth(asked.judge(choice), factors), "processor_seconds": 1.0, "process": 1}

    monkeypatch.setattr("megatron.rehearsal.recommend.rehearsed", told)
    own = best(asked)
    assert asked.answers().plans[0].choice.recompute == "none" == tried[0].recompute
    assert len(tried) <= TRIES and len(set(tried)) == len(tried)
    smallest = min(truth(each, factors) for each in every)
    if fits:
        assert own["layout"] == vars(tried[-1]) and own["rehearsed"] <= size and len(own["tried"]) == len(tried) - 1
        fastest = min((each for each in every if truth(each, factors) <= size), key=lambda each: each.step.seconds)
        assert tried[-1] == fastest.choice
    else:
        assert "none" in own and len(own["tried"]) == len(tried) and smallest > size
        assert min(truth(asked.judge(choice), factors) for choice in tried) == smallest
