"""Norms by layer: those of plain PyTorch, the same on every layout, and a training that does not notice."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.store import Store
from megatron.training.text import load_model
from tests.training.test_run import job
from tests.workers import run as on_ranks

CONFIG = """
model:
  layers: "(attention/mlp) x2"
  hidden_size: 16
  vocab_size: 64
  attention: {heads: 2}
training: {steps: 3, sequence_length: 16, global_batch_size: 4, micro_batch_size: 1}
optimizer: {lr: 0.01, gradient_clipping: 0.05, betas: [0.9, 0.95], epsilon: 1.0e-6}
schedule: {type: constant}
data: {synthetic: copy}
evaluation: {at_end: false}
checkpoint: {every: 1}
logging: {console: quiet, curve: false, predictions: false, statistics: 1}
"""
EXPERTS = ["model.layers=attention/mlp attention/moe", "model.moe.experts=4", "model.moe.hidden_size=16"]
LAYOUTS = {
    2: {
        "dp2, ZeRO 1": ["zero.stage=1"],
        "dp2, ZeRO 3": ["zero.stage=3"],
        "cp2": ["parallel.context=2"],
        "experts, ep2": [*EXPERTS, "parallel.expert=2", "zero.stage=1"],
    },
    4: {
        "tp2 sequence · pp2": ["parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2", "zero.stage=0"],
        "tp2 · dp2, ZeRO 2": ["parallel.tensor=2", "zero.stage=2"],
    },
}


def jobs(folder: str, ranks: int, layouts: dict[str, list[str]]) -> dict[str, list[dict]]:
    """Several runs on this worker's ranks, one after the other."""
    common = ["training.accumulation=null"]
    return {
        name: job(folder, ranks, *common, *overrides, f"run.dir={folder}/{ranks}-{number}")
        for number, (name, overrides) in enumerate(layouts.items())
    }


def trained(folder: Path, ranks: int, layouts: dict[str, list[str]]) -> dict[str, list[dict]]:
    (folder / "tiny.yml").write_text(CONFIG)
    return on_ranks(ranks, jobs, str(folder), ranks, layouts)[0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[Path, dict[str, list[dict]]]:
    folder = tmp_path_factory.mktemp("statistics")
    layouts = {
        "one": [],
        "off": ["logging.statistics=null"],
        "experts": EXPERTS,
        "recomputed": ["training.activation_checkpointing.mode=full", "logging.statistics=2"],
    }
    return folder, trained(folder, 1, layouts)


def lines(found: list[dict]) -> list[dict]:
    return [line for line in found if "loss" in line]


def test_training_does_not_notice(alone):
    _, found = alone
    on, off = lines(found["one"]), lines(found["off"])
    for key in ("loss", "grad_norm", "batch_hash"):
        assert [line[key] for line in on] == [line[key] for line in off]
    assert all("statistics" in line for line in on) and not any("statistics" in line for line in off)


def test_norms_are_those_of_the_checkpoints(alone):
    """Weights and their changes from the saved checkpoints; the gradient's parts make the whole, before clipping."""
    folder, found = alone
    before = None
    for number, path in enumerate(Store(folder / "1-0" / "checkpoints").paths()):
        model, _ = load_model(path, torch.device("cpu"))
        weights = {name: tensor.detach().double() for name, tensor in model.named_parameters()}
        numbers = lines(found["one"])[number]["statistics"]
        assert list(numbers) == ["embedding", "layers.0", "layers.1", "final_norm", "head"]
        for block in ("0", "1"):
            own = [name for name in weights if f".{block}." in name]
            assert own
            norm = math.sqrt(sum(float(weights[name].square().sum()) for name in own))
            assert numbers[f"layers.{block}"]["weight"] == pytest.approx(norm, rel=1e-6)
            if before is not None:
                change = math.sqrt(sum(float((weights[name] - before[name]).square().sum()) for name in own))
                assert numbers[f"layers.{block}"]["update"] == pytest.approx(change, rel=1e-4)
        whole = math.sqrt(sum(each["gradient"] ** 2 for each in numbers.values()))
        line = lines(found["one"])[number]
        assert whole == pytest.approx(line["grad_norm"], rel=1e-6) and line["grad_norm"] > 0.05
        before = weights
    assert before is not None


def test_recomputation_and_every_nth_step(alone):
    _, found = alone
    again, once = lines(found["recomputed"]), lines(found["one"])
    assert [("statistics" in line) for line in again] == [True, False, True]
    for line, other in zip(again, once):
        compare(line.get("statistics", {}), other["statistics"])


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_no_layout_changes_them(alone, tmp_path, ranks):
    for name, found in trained(tmp_path, ranks, LAYOUTS[ranks]).items():
        one = lines(alone[1]["experts" if name.startswith("experts") else "one"])
        assert len(lines(found)) == 3
        for line, other in zip(lines(found), one):
            compare(line["statistics"], other["statistics"], name)


# What is looked for is a shard that is missed or counted twice, which changes a norm by some percent. Adam makes much
# of the rounding of gradients near its epsilon, so updates differ by more than fp32 rounds.
APART = 1e-3


def compare(found: dict, expected: dict, name: str = "") -> None:
    assert not found or list(found) == list(expected)
    for layer, numbers in found.items():
        assert set(numbers) == set(expected[layer])
        for kind, value in numbers.items():
            assert value == pytest.approx(expected[layer][kind], rel=APART), (name, layer, kind)


def test_names_in_tensorboard():
    from megatron.report.tags import tagged

    record = json.loads('{"step": 3, "statistics": {"layers.0": {"weight": 2.0, "activation": 0.5}}}')
    assert tagged(record) == {"weight/layers.0": 2.0, "activation/layers.0": 0.5}
