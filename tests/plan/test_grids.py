"""Numbers that grids of tensor parallel ranks send, against AxoNN's counts, and the grids that plans propose."""

from __future__ import annotations

import json

import pytest

from megatron.config import resolve
from megatron.config.source.layers import ConfigSource
from megatron.parallel.messages.traffic import SIZES, wire_bytes
from megatron.plan import step
from megatron.plan.candidate import Candidate
from megatron.plan.devices import cluster
from megatron.plan.grids import Grids, numbers_sent, sides
from megatron.plan.messages.predict import predict
from megatron.plan.search import Answers, Question
from tests.parallel.test_depth import GOLDEN
from tools import plan as tool

H, T = 1024, 16_384
BLOCK = [(3 * H, H, False), (H, H, True), (4 * H, H, False), (H, 4 * H, True)]
ODD = {  # five heads: no two rows can share them, and two samples leave the other devices without data
    "model": {
        "layers": "(attention/mlp) x4", "hidden_size": 1280, "vocab_size": 1024, "norm": {"type": "rmsnorm"},
        "attention": {"heads": 5}, "mlp": {"hidden_size": 5120},
    },
    "training": {"steps": 10, "sequence_length": 1024, "global_batch_size": 2},
    "precision": "bf16", "data": {"synthetic": "copy"},
}  # fmt: skip


@pytest.mark.parametrize("grid", GOLDEN)
def test_counts_are_those_of_the_algorithm(grid: tuple[int, int, int]):
    assert numbers_sent(BLOCK, grid, T / grid[2]) == GOLDEN[grid]


def test_the_published_script_has_a_factor_on_the_wrong_side():
    """Of comm_model.py's own block, with its recomputation: multiples of (n - 1) / n tokens H."""
    unit = 7 / 8 * T * H
    counts = [numbers_sent(BLOCK, grid, T, 2, script) for script in (False, True) for grid in ((8, 1, 1), (1, 8, 1))]
    assert counts == [(12 * unit, 0, 0), (0, 38 * unit, 0), (24 * unit, 0, 0), (0, 32 * unit, 0)]


@pytest.fixture(scope="module")
def odd() -> Grids:
    question = Question.from_sources([ConfigSource(json.loads(json.dumps(ODD)))], cluster(8, "a100"))
    return Grids(question.answers())


def test_networks_are_those_of_the_machine_file():
    question = Question.from_sources([ConfigSource(json.loads(json.dumps(ODD)))], cluster(8, "a100", hosts=2))
    rows = Grids(Answers(question), {"mine": question.at.network}).networks()
    assert [each["network"] for each in rows] == ["mine"] * 3


def test_plans_propose_columns_where_they_are_faster(odd: Grids):
    """The first layout has columns. Every proposed layout is one that the launcher starts."""
    best = {kind: value[0] for kind, value in odd.networks()[0]["best"].items()}
    first = odd.ranking[0].plan
    assert first.choice.columns > 1 and best["all"] == pytest.approx(first.step.seconds) and best["all"] < best["rows"]
    assert {sides(each.plan.choice) for each in odd.ranking} >= {(1, 1, 1), (1, 2, 1), (1, 4, 1), (1, 8, 1), (1, 2, 2)}
    for each in odd.ranking:
        odd.question.resolved(each.plan.choice)
    assert "columns: " in odd.question.lines(first.choice)
    assert len(odd.networks()) == 3  # one host has no network
    assert "it counts 5,120 / columns numbers over rows, where 1,280 / columns are sent" in odd.difference()


def test_messages_of_depth_are_hidden_by_products_but_for_the_first_of_a_block(monkeypatch):
    """Where products are long. A block has five matrices. Selective recomputation repeats no products."""
    at, found = cluster(2, "a100"), []
    size, link = (3 + 1 + 4 + 4) * 1280**2 / 5, (at.device.link.latency * 1e-6, at.device.link.bandwidth * 1e9)
    gather, scatter = (step.ring("all_gather", 2, each * size, *link) for each in (SIZES["bf16"], SIZES["fp32"]))
    for share in (0.0, 1e9):
        monkeypatch.setattr(step, "OVERLAP", share)
        question = Question.from_sources([ConfigSource(json.loads(json.dumps(ODD)))], at)
        choices = [Candidate(depth=2, recompute=mode) for mode in ("none", "selective", "full")]
        found += [question.judge(choice).step.parts["tensor"] / 4 for choice in choices]
    shown = [(10, 5), (15, 5), (15, 5), (1, 0), (6, 0), (2, 0)]
    assert found == pytest.approx([gathers * gather + scatters * scatter for gathers, scatters in shown])


def test_numbers_of_a_plan_are_those_of_its_messages(odd: Grids):
    """Without the two numbers per token and norm, and the sums over the vocabulary."""
    for choice in (Candidate(columns=4), Candidate(columns=4, depth=2), Candidate(columns=4, pipeline=2)):
        own = {name: {**ODD.get(name, {}), **each} for name, each in choice.values().items()}
        config = resolve({**ODD, **own}, ranks=8)
        plan = odd.question.judge(choice)
        found = {"tensor": 0.0, "data": 0.0}
        for call, _, size in predict(config, 8, 0).step:
            if call.layer.startswith("layers.") and call.dtype == "bf16":
                found[call.group] += wire_bytes(call.operation, call.ranks, size) / SIZES[call.dtype]
        sent = odd._counted(plan).sent
        assert sent[:2] == (0, found["tensor"])


def test_the_command(capsys, tmp_path):
    file = tmp_path / "odd.json"
    file.write_text(json.dumps(ODD))
    assert tool.main(["grids", str(file), "--gpus", "8", "--gpu", "a100", "--layout", "pipeline=1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["grids"][0]["layout"]["pipeline"] == 1 and found["grids"][0]["sent"]["columns"] > 0
    assert found["networks"][0]["best"]["all"]["seconds"] == pytest.approx(found["grids"][0]["step"]["seconds"])
    assert tool.main(["grids", str(file), "--gpus", "8", "--gpu", "a100", "--top", "2"]) == 0
    shown = capsys.readouterr().out
    assert "wrong side" in shown and "times as fast" in shown
