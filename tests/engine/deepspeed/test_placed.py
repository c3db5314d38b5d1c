"""ZeRO 3 of pipeline stages where something reads or changes weights between steps, next to ZeRO 1 there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.config.variants import overlay
from megatron.engine.replicas import PieceHashes
from tests.selection import toured
from tests.training import runs
from tests.training.matrix import cases
from tests.workers import run

QK_CLIP = {"model": {"attention": {"qk_clip": 0.5}}}
CASES = {
    "evaluation weights": {
        # AdamW's, in place of SGD's. With a small epsilon the rounding of a tiny gradient moves a weight by up to lr.
        "optimizer": {"type": "schedule_free_adamw", "lr": 0.01, "epsilon": 1e-3, "momentum": 0.0},
        "schedule": {"type": "constant"},
    },
    "average": {"training": {"weight_average": 0.5}},
    "rows that shrink": QK_CLIP,
    "bf16, rows that shrink": {**QK_CLIP, "precision": "bf16"},
}


def read(values: dict[str, Any], ranks: int) -> tuple[list[float], list[tuple[float, float]], list, list]:
    """Losses of steps, evaluations between them, masters, and pieces with their hashes."""
    config, engine = runs.start(values, ranks)
    data, losses, evaluations = engine.mesh.data, list[float](), list[tuple[float, float]]()
    pieces = PieceHashes(engine.state)
    averages = config.training.weight_average is not None

    def evaluate() -> None:
        batch = runs.local_batch(config, runs.EVALUATION, data.rank, data.size)
        evaluations.append(runs.mean(*engine.evaluate(batch)))

    for step in range(3):
        losses += runs.steps(config, engine, step, 1)[0]
        if averages:
            engine.advance_average(0.5) if step else engine.begin_average()
            with engine.averaged():
                evaluate()
        evaluate()
    masters = runs.portable(each for each in engine.state.fragments() if each.state == "master")
    return losses, evaluations, masters, pieces.take(torch.device("cpu"))[0].tolist()


@pytest.mark.parametrize("name", toured(CASES, "layouts"))
def test_equals_zero_1(name: str):
    """Sums in another order: a rounding of fp32, or of bf16 gradients that are scattered one micro-batch at a time."""
    case = next(case for case in cases() if case.name == "fp32: gpt2 on pp2 · dp2, ZB-V, ZeRO 3 gathered once")
    values = overlay(case.values, CASES[name])
    if "bf16" in name:
        values = overlay(values, {"zero": {"reduce": "micro_batch"}})
    third = run(case.ranks, read, values, case.ranks)
    first = run(case.ranks, read, overlay(values, {"zero": {"stage": 1, "reduce": "micro_batch"}}), case.ranks)
    near = 2e-2 if "bf16" in name else 1e-5
    for mine, other in zip(third, first):
        assert mine[0] == pytest.approx(other[0], rel=near)
        assert mine[1] == [pytest.approx(each, rel=near) for each in other[1]]
    masters, wanted = (runs.assemble([each[2] for each in found]) for found in (third, first))
    assert masters.keys() == wanted.keys()
    for key, values_of_one in wanted.items():
        assert abs(masters[key] - values_of_one).max() <= 20 * near * abs(values_of_one).max(), key
    held = [dict(map(tuple, each[3])) for each in third]
    for one in held:
        assert all(one[code] == other[code] for other in held for code in one.keys() & other.keys())
