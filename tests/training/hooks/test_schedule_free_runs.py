"""Schedule-free runs: evaluated and saved at the average of the weights, and nothing else notices an evaluation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron.testing.ranks import on_ranks
from tests.selection import toured
from tests.training import runs
from tests.training.matrix import merged, read

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
RECIPE = {
    "training": {"micro_batch_size": 2},
    "schedule": {"type": "constant"},
    "optimizer": {"type": "schedule_free_adamw", "lr": 0.05, "epsilon": 1e-3},
}


def evaluated(values: dict[str, Any], ranks: int, often: bool) -> tuple[list[list], list[float], list[tuple]]:
    """On every rank: fragments after each of three steps. Their losses. Evaluations before each and at the end, and
    after it that of a second engine which begins with the weights that the first has saved.
    """
    config, engine = runs.start(values, ranks)
    data = engine.mesh.data
    batch = runs.local_batch(config, runs.EVALUATION, data.rank, data.size)
    seen, losses, evaluations = [], [], []
    for step in range(3):
        if often:
            evaluations += [runs.mean(*engine.evaluate(batch)) for _ in range(2)]
        losses += runs.steps(config, engine, step, 1)[0]
        seen.append(runs.portable(engine.state.fragments()))
    evaluations.append(runs.mean(*engine.evaluate(batch)))
    masters = [each.data.clone() for each in engine.state.fragments() if each.state == "master"] if ranks == 1 else []
    if masters:
        other = runs.build(config, ranks)
        for target, values in zip(other.state.masters(), masters, strict=True):
            target.data.copy_(values)
        other.state.refresh()
        evaluations.append(runs.mean(*other.evaluate(batch)))
    return seen, losses, evaluations


@pytest.mark.parametrize("layout", toured(LAYOUTS, "layouts"))
def test_an_evaluation_is_of_the_average_and_leaves_no_trace(layout):
    matrix = read()
    own = {k: v for k, v in LAYOUTS[layout].items() if k != "ranks"}
    model = {k: v for k, v in matrix["architectures"]["llama"].items() if k != "about"}
    ranks = LAYOUTS[layout]["ranks"]
    values = merged(matrix["common"], model, RECIPE, own)
    found, without = (on_ranks(ranks, evaluated, values, ranks, often) for often in (True, False))
    stages, plain = (
        [runs.assemble([each[0][i] for each in results]) for i in range(3)] for results in (found, without)
    )
    for stage, other in zip(stages, plain):
        assert stage.keys() == other.keys() and all(np.array_equal(stage[key], other[key]) for key in stage)
    assert found[0][1] == without[0][1]
    x: dict = {}
    for number, stage in enumerate(stages):
        for name, state in stage:
            if state != "master":
                continue
            y, z = stage[name, "trained"].astype(np.float64), stage[name, "z"].astype(np.float64)
            np.testing.assert_allclose(stage[name, "master"], (y - 0.1 * z) / 0.9, rtol=1e-5, atol=1e-6)
            if number:  # all rates are equal: the share of step t is 1 / t
                wanted = (x[name, "master"] * number + z) / (number + 1)
                np.testing.assert_allclose(stage[name, "master"], wanted, rtol=1e-5, atol=1e-6)
                assert not np.allclose(stage[name, "master"], y, rtol=1e-4)
        x = stage
    evaluations = found[0][2]
    assert evaluations[0] == evaluations[1] != evaluations[2] == evaluations[3]
    assert evaluations[6] == without[0][2][0]
    if ranks == 1:
        assert evaluations[7] == evaluations[6]


def between(values: dict[str, Any], ranks: int, evaluates: bool) -> list[float]:
    """Losses of four steps, with two evaluations before the last or none: the engine has seen whole steps by then."""
    config, engine = runs.start(values, ranks)
    data = engine.mesh.data
    losses = runs.steps(config, engine, 0, 3)[0]
    for _ in range(2 * evaluates):
        engine.evaluate(runs.local_batch(config, runs.EVALUATION, data.rank, data.size))
    return losses + runs.steps(config, engine, 3, 1)[0]


@pytest.mark.parametrize("micro_batch", [2, 4])
def test_a_step_after_an_evaluation_reads_what_is_trained(micro_batch: int):
    """At ZeRO 3 DeepSpeed leaves parameters gathered after a forward pass that looks like the beginning of a step."""
    matrix = read()
    model = {k: v for k, v in matrix["architectures"]["llama"].items() if k != "about"}
    own = {"zero": {"stage": 3, "persistent_size": 100}, "training": {"steps": 4, "micro_batch_size": micro_batch}}
    values = merged(matrix["common"], model, RECIPE, own)
    assert on_ranks(2, between, values, 2, True) == on_ranks(2, between, values, 2, False)
