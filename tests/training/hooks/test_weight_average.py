"""The moving average of the weights: its values, its evaluation, and that nothing else notices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron.config import resolve
from megatron.model.stack import build_model
from megatron.parallel.layers.parameters import stored_tensors
from megatron.testing.ranks import on_ranks
from tests.selection import toured
from tests.training import runs
from tests.training.matrix import merged, read

COEFFICIENT = 0.7
LAYOUTS = {
    "one, ZeRO 0": {"ranks": 1, "zero": {"stage": 0}},
    "dp2, ZeRO 3": {"ranks": 2, "zero": {"stage": 3, "persistent_size": 100}},
    "dp2, ZeRO 3, one micro-batch": {
        "ranks": 2,
        "zero": {"stage": 3, "persistent_size": 100},
        "training": {"micro_batch_size": 4},
    },
    "tp2 · pp2, ZeRO 1, bf16": {"ranks": 4, "parallel": {"tensor": 2, "pipeline": 2}, "precision": "bf16"},
}


def averaged(values: dict[str, Any], ranks: int) -> tuple[list[list], tuple, tuple, tuple]:
    """On every rank: fragments before and after each of two steps. Evaluations with the weights, with the average, and
    with the weights again.
    """
    config, engine = runs.start(values, ranks)
    engine.state.begin_average()
    data = engine.mesh.data
    batch = runs.local_batch(config, runs.EVALUATION, data.rank, data.size)
    seen = [runs.portable(engine.state.fragments())]
    for step in range(2):
        runs.steps(config, engine, step, 1)
        engine.state.advance_average(COEFFICIENT)
        seen.append(runs.portable(engine.state.fragments()))
    before = runs.mean(*engine.evaluate(batch))
    with engine.state.averaged():
        inside = runs.mean(*engine.evaluate(batch))
        masters = runs.portable(f for f in engine.state.fragments() if f.state == "master")
    seen.append(masters)
    after = runs.mean(*engine.evaluate(batch))
    seen.append(runs.portable(engine.state.fragments()))
    return seen, before, inside, after


def plain_evaluation(values: dict[str, Any], weights: dict[tuple[str, str], np.ndarray]) -> float:
    """The loss of these masters on the batch for evaluation, in one process of plain PyTorch."""
    config = resolve(values)
    model, batch = build_model(config, dtype=torch.float32).eval(), runs.global_batch(config, runs.EVALUATION)
    with torch.no_grad():
        for parameter in stored_tensors(model):
            parameter.copy_(torch.from_numpy(weights[parameter.logical.name, "master"]).view_as(parameter))
        ce, _, _ = runs.token_losses(config, model, batch, slice(None))
    return float((ce * batch.loss_mask[0]).double().sum() / batch.loss_mask.double().sum())


@pytest.mark.parametrize("layout", toured(LAYOUTS, "layouts"))
def test_the_average_is_the_formulas_and_leaves_no_trace(layout):
    matrix = read()
    own = {k: v for k, v in LAYOUTS[layout].items() if k != "ranks"}
    model = {k: v for k, v in matrix["architectures"]["llama"].items() if k != "about"}
    settings = {
        "training": {"weight_average": COEFFICIENT, "micro_batch_size": 2},
        "optimizer": {"type": "adamw", "lr": 0.05},
    }
    ranks, plain = LAYOUTS[layout]["ranks"], merged(matrix["common"], model, settings)
    found = on_ranks(ranks, averaged, merged(plain, own), ranks)
    start, first, second, inside, end = (runs.assemble([each[0][i] for each in found]) for i in range(5))
    for name, state in list(start):
        if state != "master":
            continue
        wanted = start[name, "master"].astype(np.float64)
        for stage in (first, second):
            wanted = COEFFICIENT * wanted + (1 - COEFFICIENT) * stage[name, "master"]
        np.testing.assert_allclose(second[name, "average"], wanted, rtol=1e-5, atol=1e-7)
        assert not np.array_equal(second[name, "average"], second[name, "master"]), name
        assert np.array_equal(inside[name, "master"], second[name, "average"]), name
    assert end.keys() == second.keys() and all(np.array_equal(end[key], second[key]) for key in end)
    for _, before, during, after in found:
        assert before == after and abs(before[0] - during[0]) > 1e-4
        if own.get("precision") != "bf16":
            assert during[0] == pytest.approx(plain_evaluation(plain, inside), rel=1e-5)
