"""Weights of blends against published values and plain counts, and mixtures that tiny runs predict."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import yaml

from megatron.data.errors import DataError
from megatron.data.plan_builder import build_plan
from megatron.data.skipped_batches import LeftOut
from megatron.suite.members import read_suite
from megatron.suite.mixture import STEP, Regression, over_time, proposals, rank_correlation, shares
from tests.data.make import configuration, write_sizes
from tools.data.mixture import main, options, show

# Sizes, and UniMax's result of them for 250e9 characters and 4 epochs, by the program unimax-sampling.
LANGUAGES = {"swe": 179955884499, "fas": 184595788282, "ekk": 42541080893, "isl": 10027573389, "fao": 549707867}
UNIMAX = {
    "fao": 0.008795325872,
    "isl": 0.160441174224,
    "swe": 0.276921166635,
    "fas": 0.276921166635,
    "ekk": 0.276921166635,
}


def test_unimax_is_an_infinite_temperature_with_a_cap() -> None:
    found = shares(LANGUAGES, 250e9, math.inf, cap=4)
    assert found == pytest.approx(UNIMAX, rel=1e-9)
    assert found["ekk"] * 250e9 / LANGUAGES["ekk"] == pytest.approx(1.627375, rel=1e-6)


def test_temperatures_caps_and_budgets() -> None:
    sizes = {"a": 100.0, "b": 400.0, "c": 500.0}
    assert shares(sizes, 1000) == pytest.approx({"a": 0.1, "b": 0.4, "c": 0.5})
    roots = {name: math.sqrt(size) for name, size in sizes.items()}
    expected = {name: root / sum(roots.values()) for name, root in roots.items()}
    assert shares(sizes, 1000, temperature=2) == pytest.approx(expected)
    capped = shares(sizes, 2000, temperature=2, cap=2.5)  # a would be read 4.2 times
    assert capped["a"] * 2000 == pytest.approx(250) and capped["b"] / capped["c"] == pytest.approx(20 / math.sqrt(500))
    assert sum(capped.values()) == pytest.approx(1)
    fixed = shares(sizes, 1000, budgets={"a": 550})
    assert fixed == pytest.approx({"a": 0.55, "b": 0.2, "c": 0.25})
    assert shares(sizes, 1000, budgets={"a": 100, "b": 400, "c": 500}) == pytest.approx({"a": 0.1, "b": 0.4, "c": 0.5})
    low = shares({"a": 1.0, "b": 1e4, "c": 2e4, "d": 1e5}, 124000, temperature=0.004, cap=1)  # (b / d) ** 250 is 0
    assert low == pytest.approx({"a": 0, "b": 4e3 / 124e3, "c": 2e4 / 124e3, "d": 1e5 / 124e3})
    assert shares({"a": 0.1, "b": 1.0}, 0.7, cap=3, budgets={"a": 0.1 * 3})["b"] == pytest.approx(4 / 7)
    for keys in ({"cap": 0.9}, {"budgets": {"a": 1100}}, {"budgets": {"a": 300}, "cap": 2}):
        with pytest.raises(DataError):
            shares(sizes, 1000, **keys)


def test_proposals_are_different_mixtures_within_their_bounds() -> None:
    prior = [0.7, 0.2, 0.09, 0.01]
    found = proposals(prior, 200, seed=3)
    assert found.shape == (200, 4) and len(np.unique(found, axis=0)) == 200
    assert np.allclose(found.sum(axis=1), 1, atol=1e-9) and (found <= 15 * np.array(prior) + 2 * STEP).all()
    assert np.allclose(found / STEP, np.round(found / STEP), atol=1e-6) and (found >= 0).all()
    assert (found == proposals(prior, 200, seed=3)).all() and (found[:9] != proposals(prior, 9, seed=4)).any()
    assert (found.max(axis=1) > 0.9).any() and (found.max(axis=1) < 0.6).any()  # sharp ones and even ones
    with pytest.raises(DataError, match="different mixtures"):
        proposals([1.0], 2, seed=0)


def law(weights: np.ndarray) -> np.ndarray:
    """A loss that is lowest where the square roots are as 3 : 2 : 1."""
    return 5 - np.sqrt(weights) @ np.array([3.0, 2.0, 1.0]) / 4


def test_a_regression_finds_the_best_mixture_of_a_known_law() -> None:
    table = proposals([0.4, 0.3, 0.3], 64, seed=1)
    found = Regression.of(table, law(table))
    assert found.held_out == pytest.approx(1.0)
    assert np.allclose(found.predict(table), law(table), atol=2e-3)  # the penalty moves it a little
    best = found.best([0.4, 0.3, 0.3])
    assert best == pytest.approx(np.array([9, 4, 1]) / 14, abs=0.03)
    draw = np.random.default_rng(0)
    assert abs(Regression.of(table, draw.normal(size=64)).held_out) < 0.7  # 16 held-out runs of noise
    with pytest.raises(DataError, match="8 are needed"):
        Regression.of(table[:7], law(table[:7]))


def test_rank_correlation_is_scipys() -> None:
    stats = pytest.importorskip("scipy.stats")
    draw = np.random.default_rng(5)
    for _ in range(20):
        one, other = draw.integers(0, 6, (2, 15)).astype(float)
        assert rank_correlation(one, other) == pytest.approx(stats.spearmanr(one, other).statistic, abs=1e-12)


@pytest.mark.parametrize("pairs", [((3, 2), (9, 1)), ((9, 3), (4, 2))])
def test_tokens_over_time_are_those_of_every_sample(pairs: tuple, tmp_path: Path) -> None:
    """Batches of 2 samples up to step 5, then of 4. The samples of skipped batches are taken out of a list."""
    for name in ("a", "b", "c"):
        write_sizes(tmp_path / name, [40] * 50, seed=ord(name))
    source = {name: {"path": str(tmp_path / name), "weight": weight} for name, weight in zip("abc", (0.7, 0.3, 1.0))}
    data = {"train": [source["a"], source["b"]], "phases": [{"start": 7, "sources": [source["b"], source["c"]]}]}
    training = {"steps": 20, "sequence_length": 16, "global_batch_size": 4, "micro_batch_size": 2}
    training["batch_schedule"] = [{"until": 5, "global_batch_size": 2}]
    plan, left_out = build_plan(configuration(data, training=training)), LeftOut(pairs)
    before = [2 * step + 2 * max(step - 5, 0) for step in range(40)]
    samples = list(range(200))
    for first, count in pairs:
        del samples[before[first] : before[first + count]]
    points = over_time(plan, 12, left_out, 5)
    steps = [each["step"] for each in points]
    assert (
        steps[0] == 4
        and {4, 7, 8, 12, 16} <= set(steps)
        and [each["read"] for each in points] == [step <= 12 for step in steps]
    )
    for point in points:
        read = samples[: before[point["step"]]]
        if read[-1] < before[20]:
            counts = dict.fromkeys("abc", 0)
            for sample in read:
                phase, member, _ = plan.place(sample)
                counts[plan.sources[phase.members[member]].name] += 16
            assert point["tokens"] == counts


def tool(*words: str) -> dict:
    return main(options().parse_args(list(map(str, words))))


def test_the_tool_weighs_proposes_and_fits(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for name, documents in (("web", 60), ("books", 20), ("code", 20)):
        write_sizes(tmp_path / name, [100] * documents)
    given = ["web=web", "books=books", "code=code"]
    found = tool("weigh", *given, "--tokens", 20000, "--temperature", "inf", "--cap", 3)
    assert {name: row["epochs"] for name, row in found["sources"].items()} == pytest.approx(
        {name: 8000 / 6000 if name == "web" else 3 for name in ("web", "books", "code")}, rel=0.02
    )
    show(found)
    made = yaml.safe_load(capsys.readouterr().out)["data"]["train"]
    assert {each["name"]: each["weight"] for each in made} == {
        name: row["share"] for name, row in found["sources"].items()
    }
    (tmp_path / "base.yml").write_text(
        "model: {layers: attention/mlp, hidden_size: 16, vocab_size: 64, attention: {heads: 2}}\n"
        "training: {steps: 4, sequence_length: 16, global_batch_size: 2}\ntokenizer: {type: none, eod_id: 0}\n"
    )
    tool("propose", *given, "--count", 24, "--base", "base.yml", "--output", "mixtures.yml")
    suite = read_suite(tmp_path / "mixtures.yml")
    resolved = suite.resolved()
    assert len(suite.members) == 24
    names = ["web", "books", "code"]
    for member in suite.members:
        weights = {each.name: each.weight for each in resolved[member.name].config.data.train}
        loss = float(law(np.array([weights.get(name, 0.0) for name in names])))
        member.folder.mkdir(parents=True)
        events = [{"event": "start", "step": 0}, {"event": "end", "step": 4}]
        (member.folder / "ledger.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
        if member is suite.members[-1]:
            loss = math.nan  # it diverged
        (member.folder / "metrics.jsonl").write_text(
            json.dumps({"step": 4, "validation": {"held": {"loss": loss}}}) + "\n"
        )
    found = tool("fit", "mixtures.yml")
    assert found["runs"] == 23 and found["validation"] == "held" and found["held_out_rank_correlation"] > 0.9
    assert found["predicted"]["loss"] <= found["best_run"]["loss"] + 0.02
    show(found)
    assert "rank correlation" in capsys.readouterr().out
    write_sizes(tmp_path / "empty", [0])
    for words in (
        ["weigh", "web"],
        ["weigh", *given, "empty=empty"],
        ["weigh", *given, "--budget", "none=1"],
        ["propose", *given],
        ["weigh", *given, "--budget", "web=x"],
    ):
        with pytest.raises(DataError):
            tool(*words)
