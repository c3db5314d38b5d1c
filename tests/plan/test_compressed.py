"""Collectives in fewer bytes, as plans time them and as a rehearsed rank of the real program sends them."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from megatron.config import resolve
from megatron.parallel.messages.traffic import Tally
from megatron.plan.devices import cluster
from megatron.plan.messages.predict import predict
from megatron.plan.prediction import choice_of
from megatron.plan.shapes import Shapes
from megatron.plan.step import StepEstimator
from megatron.rehearsal.command import PRELOADED
from tests.training.matrix import merged

BASE = {
    "model": {"layers": "(attention/mlp) x4", "hidden_size": 64, "vocab_size": 96, "attention": {"heads": 4}},
    "training": {"steps": 1, "sequence_length": 16, "micro_batch_size": 2, "global_batch_size": 4},
    "parallel": {"pipeline": 2},
    "zero": {"stage": 0},
    "data": {"synthetic": "copy"},
}
RWKV = {"layers": "(rwkv7/rwkv7_ffn) x4", "rwkv7": {"head_dim": 16}}  # something travels next to the hidden state
CASES = {"int8_block": {}, "bf16": {}, "int8_block beside a channel": {"model": RWKV}}


def compressed(name: str) -> dict[str, Any]:
    return merged(BASE, CASES[name], {"parallel": {"communication": {"compress": {"pipeline": name.split()[0]}}}})


def rehearsed(names: list[str]) -> dict[str, list]:
    """In a process of its own: the messages of each stage, by case."""
    from megatron.rehearsal.rank import rehearse_rank

    return {
        name: [rehearse_rank(resolve(compressed(name), ranks=2), 2, at).messages for at in (0, 1)] for name in names
    }


@pytest.mark.parametrize("name", CASES)
def test_stages_are_rehearsed(name: str, found: dict[str, list]):
    config = resolve(compressed(name), ranks=2)
    for rank, rows in enumerate(found[name]):
        sent = Tally.of_rows(rows).by("group", "operation", "dtype")
        wanted = predict(config, 2, rank).step.by("group", "operation", "dtype")
        ends = {key: each for key, each in sent.items() if key[1] in ("send", "recv") and key[2] != "int32"}
        assert ends and ends == {key: wanted[key] for key in wanted if key[1] in ("send", "recv")}


@pytest.fixture(scope="module")
def found() -> dict[str, list]:
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(rehearsed, list(CASES)).result()


@pytest.mark.parametrize(("axis", "part"), [("tensor", "tensor"), ("pipeline", "pipeline"), ("data", "data")])
def test_plans_know_fewer_bytes(axis: str, part: str):
    """Of large messages, where bandwidth decides, 8 bits with a scale for 256 take 0.254 of the time of fp32."""
    model = {"layers": "(attention/mlp) x32", "hidden_size": 4096, "attention": {"heads": 32}}
    large = {"model": model, "training": {"sequence_length": 4096, "micro_batch_size": 16, "global_batch_size": 32}}
    parallel = {"tensor": 2, "pipeline": 2}
    times = []
    for wire in ("none", "int8_block"):
        own = {"parallel": {**parallel, "communication": {"compress": {axis: wire}}}}
        config = resolve(merged(BASE, large, own), ranks=8)
        shapes = Shapes(config, 8)
        times.append(StepEstimator(config, shapes, cluster(8, "h100")).step(config, choice_of(config)).parts)
    for name in ("tensor", "pipeline", "data"):
        expected = (1 + 4 / 256) / 4 if name == part else 1.0
        assert times[1][name] / times[0][name] == pytest.approx(expected, rel=0.05), name
