"""Scaling laws: published points give the published numbers, made-up points their truth, and runs their losses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from megatron.config.problems import UserError
from megatron.suite.members import read_suite
from megatron.suite.scaling.law import Law, _Problem, fit_isoflop, fit_law
from megatron.suite.scaling.points import Points, points_of, read_points, write_points
from megatron.suite.scaling.study import study
from tests.paths import ROOT
from tools.suite import main

PUBLISHED = ROOT / "tests" / "suite" / "published"
TRUTH = Law(floor=1.7, log_a=math.log(400.0), log_b=math.log(1200.0), alpha=0.34, beta=0.29)


def made(noise: float, seed: int, law: Law = TRUTH) -> Points:
    """Sixteen models of 10 million to 3 billion parameters, each with five points. Errors of log L with one part that a
    run's points share.
    """
    draw = np.random.default_rng(seed)
    rows = []
    for size in np.geomspace(1e7, 3e9, 16):
        shared = draw.normal(0, noise)
        for tokens in np.geomspace(1e9, 1e11, 5):
            error = math.exp(shared + draw.normal(0, noise))
            rows.append((f"{size:.0f}", size, tokens, 6 * size * tokens, float(law.loss(size, tokens)) * error))
    return Points.of(rows)


def optimum(law: Law, flops: float) -> tuple[float, float]:
    """(N, D) with the lowest loss of all with 6 N D = flops."""
    a, b = law.exponents
    log_g = (math.log(law.alpha / law.beta) + law.log_a - law.log_b) / (law.alpha + law.beta)
    size = math.log(flops / 6)
    return math.exp(log_g + a * size), math.exp(b * size - log_g)


def test_gemstones_published_points_give_their_numbers():
    """Their own fit of the same points: parameters_delta-3/approach_3_parameters_grid_search_0_hot.json."""
    found = fit_law(read_points(PUBLISHED / "gemstones.csv"))
    assert found.alpha == pytest.approx(0.2928686863, abs=2e-4) and found.beta == pytest.approx(0.712872206, abs=2e-4)
    assert math.log(found.floor) == pytest.approx(0.7622636901, abs=2e-4)
    assert found.log_a == pytest.approx(5.3613398367, abs=2e-3)
    assert found.log_b == pytest.approx(15.415994531, abs=5e-3)
    assert found.objective <= 0.0019816129  # theirs


def test_chinchillas_points_give_the_numbers_of_the_replication():
    """Besiroglu et al. 2024: E = 1.8172, A = 482.01, B = 2085.43, alpha = 0.3478, beta = 0.3658, with standard errors
    of 0.03, 124.58, 1293.23, 0.02 and 0.02. They too omitted five points.
    """
    points = read_points(PUBLISHED / "chinchilla.csv")
    found = fit_law(points.take(np.argsort(points.tokens)[5:]))
    assert found.floor == pytest.approx(1.8172, abs=0.003)
    assert found.alpha == pytest.approx(0.3478, abs=0.002) and found.beta == pytest.approx(0.3658, abs=0.002)
    assert math.exp(found.log_a) == pytest.approx(482.01, rel=0.05)
    assert math.exp(found.log_b) == pytest.approx(2085.43, rel=0.05)


def test_points_of_a_law_give_the_law():
    found = fit_law(made(0.0, 0))
    for name in ("floor", "log_a", "log_b", "alpha", "beta"):
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=1e-3)
    assert found.exponents == pytest.approx((0.29 / 0.63, 0.34 / 0.63), rel=1e-3)


def test_the_gradient_of_the_objective():
    problem = _Problem.of(made(0.01, 3), 1e-3)
    at = problem.numbers(Law(1.2, 5.0, 8.0, 0.3, 0.4))
    exact = problem.value(at)[1]
    for place in range(5):
        step = np.zeros(5)
        step[place] = 1e-6
        slope = (problem.value(at + step)[0] - problem.value(at - step)[0]) / 2e-6
        assert exact[place] == pytest.approx(slope, rel=1e-5)


def test_the_optimum_is_the_lowest_loss_of_a_budget():
    size, tokens = optimum(TRUTH, 1e20)
    assert 6 * size * tokens == pytest.approx(1e20)
    others = np.geomspace(size / 10, size * 10, 2001)
    losses = TRUTH.loss(others, 1e20 / 6 / others)
    assert others[np.argmin(losses)] == pytest.approx(size, rel=0.01)


def test_profiles_find_the_optimum_of_a_law():
    """Near its minimum a law's profile is a parabola, so sizes within a factor of two of it are given."""
    rows = []
    for budget in (1e18, 1e19, 1e20, 1e21):
        best, _ = optimum(TRUTH, budget)
        for size in best * np.geomspace(0.6, 1.6, 7):
            tokens = budget / 6 / size
            rows.append((f"{size:.0f}", size, tokens, budget, float(TRUTH.loss(size, tokens))))
    found = fit_isoflop(Points.of(rows), [1e18, 1e19, 1e20, 1e21])
    a, b = TRUTH.exponents
    assert found.a == pytest.approx(a, abs=2e-3) and found.b == pytest.approx(b, abs=2e-3)
    assert all(each.best[0] == pytest.approx(optimum(TRUTH, each.flops)[0], rel=0.01) for each in found.profiles)


def test_profiles_between_points_of_curves():
    found = fit_isoflop(made(0.0, 0))
    assert found.a == pytest.approx(TRUTH.exponents[0], abs=0.05)
    assert all(len(each.runs) >= 4 for each in found.profiles)
    falling = Law(floor=1.0, log_a=12.0, log_b=1.0, alpha=0.5, beta=0.3)  # so few tokens' worth that larger is better
    rising = fit_isoflop(made(0.0, 0, falling))
    assert rising.a is None or sum(each.best is None for each in rising.profiles) > 0


@pytest.mark.slow
def test_intervals_hold_the_truth():
    """Three sets of noisy points: 95 % intervals of two exponents, so of six at most one may miss it (the chance of
    more is 3 % if they are right).
    """
    missed = 0
    for seed in range(3):
        found = study(made(0.004, seed), resamples=50, seed=seed)
        for name, truth in (("alpha", TRUTH.alpha), ("beta", TRUTH.beta)):
            low, high = found.intervals[name]
            missed += not low <= truth <= high
            assert 0 < high - low < 0.3
    assert missed <= 1
    assert found.held_out is not None and found.held_out.predicted == pytest.approx(found.held_out.loss, rel=0.02)


def test_whole_runs_are_resampled():
    points = made(0.01, 1)
    drawn = points.resampled(np.random.default_rng(0))
    assert len(drawn) == len(points) and len(drawn.names) == 16
    for places in drawn.places().values():
        own = drawn.take(places)
        assert len(set(own.parameters)) == 1 and len(own) == 5


def test_tables_and_their_mistakes(tmp_path):
    points, path = made(0.01, 2), tmp_path / "points.csv"
    write_points(points, path)
    again = read_points(path)
    assert again.runs == points.runs and np.array_equal(again.loss, points.loss)
    for text, said in (
        ("run,tokens\n", "lacks parameters, loss"),
        ("run,parameters,tokens,loss\na,1,2,x\n", "points.csv:2: .* must be numbers"),
        ("run,parameters,tokens,loss\na,1,2,3\nb,1,0,3\n", "points.csv:3: .* must be above 0"),
        ("run,parameters,tokens,loss\na,1,2\n", "points.csv:2"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=said):
            read_points(path)
    with pytest.raises(UserError, match="at least 6 points"):
        fit_law(points.take(range(5)))
    with pytest.raises(UserError, match="different parameters"):
        fit_law(points.take([0, 1, 2, 3, 4, 0]))


def test_the_tool_fits_a_table(tmp_path, capsys):
    path = tmp_path / "points.csv"
    write_points(made(0.002, 4), path)
    assert main([str(path), "fit", "--resamples", "10", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    low, high = found["numbers"]["alpha"]["interval"]
    assert low < found["numbers"]["alpha"]["value"] < high and found["runs"] == 16 and found["points"] == 80
    assert (tmp_path / "points-scaling.png").read_bytes().startswith(b"\x89PNG")
    assert main([str(tmp_path / "none.csv"), "fit"]) == 2


BASE = """
model: {layers: "attention/mlp", hidden_size: 16, vocab_size: 64, attention: {heads: 2}}
training: {steps: 40, sequence_length: 16, global_batch_size: 2}
schedule: {type: constant, warmup_steps: 8}
data: {synthetic: copy}
"""
SUITE = """
name: sizes
ranks: 1
files: [base.yml]
axes:
  width: {w16: {}, w32: {model.hidden_size: 32}, w64: {model.hidden_size: 64}}
"""


def test_points_of_runs_and_their_branches(tmp_path, monkeypatch, capsys):
    """At a constant rate, points after the warmup. At the end, points of branches instead of their trunks'."""
    monkeypatch.chdir(tmp_path)
    Path("base.yml").write_text(BASE)
    Path("sizes.yml").write_text(SUITE)
    suite = read_suite(Path("sizes.yml"))
    resolved = suite.resolved()
    with pytest.raises(UserError, match="no run of runs/sizes has a validation loss"):
        points_of(suite, resolved, "end", None, embeddings=True)
    for number, member in enumerate(suite.members):
        member.folder.mkdir(parents=True)
        losses = [
            {"step": step, "validation": {"v": {"loss": 2 + 9 / (number + 2) + 4 / step**0.5}}}
            for step in (5, 10, 20, 40)
        ]
        (member.folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in losses))
    found = points_of(suite, resolved, "constant", None, embeddings=True)
    assert list(found.tokens) == [step * 32 for _ in range(3) for step in (10, 20, 40)]
    assert found.loss[0] == 2 + 9 / 2 + 4 / 10**0.5 and found.names == ["w16", "w32", "w64"]
    assert list(points_of(suite, resolved, "end", "v", embeddings=True).tokens) == [40 * 32] * 3
    small = points_of(suite, resolved, "end", "v", embeddings=False)
    assert found.parameters[0] - small.parameters[0] == 2 * 64 * 16  # embedding and head
    branch = Path("runs/sizes/w32-from-40")
    branch.mkdir()
    (branch / "metrics.jsonl").write_text('{"step": 44, "validation": {"v": {"loss": 3.5}}}\n')
    config = resolved["w32"].config
    text = json.dumps(json.loads(config.model_dump_json()))
    (branch / "config.yml").write_text(text)
    ends = points_of(suite, resolved, "end", None, embeddings=True)
    assert ends.names == ["w16", "w32-from-40", "w64"] and list(ends.tokens) == [1280, 44 * 32, 1280]
    assert ends.loss[1] == 3.5
    assert main(["sizes.yml", "fit"]) == 2
    assert "at least 6 points" in capsys.readouterr().err
    assert main(["sizes.yml", "fit", "--points", "constant", "--resamples", "4"]) == 0
    assert "drawn with replacement" in capsys.readouterr().out
    assert len(read_points(Path("runs/sizes/points.csv"))) == 9
