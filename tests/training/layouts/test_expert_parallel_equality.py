"""Experts on 1, 2 and 4 ranks: gradients, losses, weights and corrections equal one process of plain PyTorch."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.training import runs
from tests.training.matrix import merged, read
from tests.workers import run

pytestmark = pytest.mark.layouts

LR = 8.0  # so large that a step's change is the gradient to five digits, although the weights have seven
ONE_STEP = {
    "training": {"steps": 1},
    "optimizer": {"type": "sgd", "lr": LR, "momentum": 0.0, "weight_decay": 0.0, "gradient_clipping": 1e9},
}
THREE_STEPS = {
    "training": {"steps": 3},
    "optimizer": {"type": "adamw", "lr": 0.01, "epsilon": 1e-3, "gradient_clipping": 0.3},
}
BF16 = merged(ONE_STEP, {"precision": "bf16"})

LAYOUTS: dict[str, dict[str, Any]] = {
    "ep1": {"zero": {"stage": 1}},
    "ep2, ZeRO 0": {"parallel": {"expert": 2}, "zero": {"stage": 0}},
    "ep2, ZeRO 1": {"parallel": {"expert": 2}, "zero": {"stage": 1}},
    "ep4, ZeRO 1, recomputation": {
        "parallel": {"expert": 4},
        "zero": {"stage": 1},
        "training": {"activation_checkpointing": {"mode": "full"}},
    },
    "ep4, ZeRO 2": {"parallel": {"expert": 4}, "zero": {"stage": 2}},
    "tp2, ep2": {"parallel": {"tensor": 2, "expert": 2}, "zero": {"stage": 1}},
    "tp2, ep1 folded": {"parallel": {"tensor": 2, "expert_tensor": 1}, "zero": {"stage": 1}},
    "tp2, ep2 folded": {"parallel": {"tensor": 2, "expert": 2, "expert_tensor": 1}, "zero": {"stage": 2}},
    "tp2, ep4 folded": {
        "parallel": {"tensor": 2, "expert": 4, "expert_tensor": 1, "sequence": True},
        "zero": {"stage": 1},
    },
    "pp2, ep2": {"parallel": {"pipeline": 2, "expert": 2}, "zero": {"stage": 1}},
}

SEVERAL_STEPS = ("ep4, ZeRO 2", "tp2, ep2 folded", "tp2, ep4 folded", "pp2, ep2")  # each way of placing experts


def values(recipe: dict[str, Any], layout: dict[str, Any]) -> dict[str, Any]:
    matrix = read()
    own = {
        key: value
        for key, value in matrix["architectures"]["moe, even vocabulary"].items()
        if key not in ("about", "apart")
    }
    # Slices of experts are rows of 16 bytes too.
    small = {"training": {"micro_batch_size": 2}, "model": {"moe": {"hidden_size": 16}}}
    return merged(matrix["common"], own, small, recipe, layout)


@cache
def alone(name: str) -> tuple[runs.Outcome, dict[str, np.ndarray]]:
    """The run of one process, and what it starts from."""
    plain = values({"gradients": ONE_STEP, "training": THREE_STEPS, "bf16": BF16}[name], {})
    return runs.plainly(plain), runs.initial(plain)


def on_four_ranks(recipe: dict[str, Any], layout: str) -> tuple[list, dict[str, np.ndarray]]:
    results = run(4, runs.train, values(recipe, LAYOUTS[layout]), 4)
    return results, {name: found for (name, _), found in runs.assemble([result[3] for result in results]).items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients(layout: str):
    """Each tensor's change in a step, over the learning rate, and each correction's, which is a step of its rate or
    none.
    """
    expected, begin = alone("gradients")
    results, weights = on_four_ranks(ONE_STEP, layout)
    assert weights.keys() == expected.weights.keys()
    assert sum("experts" in name for name in weights) == 6
    for name, found in weights.items():
        ours, theirs = (each.astype(np.float64) - begin[name] for each in (found, expected.weights[name]))
        if name.endswith("correction"):
            np.testing.assert_array_equal(found, expected.weights[name])
            assert set(np.round(np.abs(theirs) / 0.05, 4)) <= {0.0, 1.0} and np.abs(theirs).max() > 0.04
            continue
        rounding = 2.0**-23 * np.linalg.norm(begin[name])
        assert np.linalg.norm(ours - theirs) <= 2e-5 * np.linalg.norm(theirs) + rounding, name
        assert np.linalg.norm(theirs) > 100 * rounding, f"{name}: its gradient is too small to be told from rounding"
    for losses, norms, *_ in results:
        np.testing.assert_allclose(losses, expected.losses, rtol=1e-5)
        np.testing.assert_allclose(norms, expected.norms, rtol=1e-5)


@pytest.mark.parametrize(
    "layout", [name if name in SEVERAL_STEPS else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_losses_and_final_weights(layout: str):
    expected, begin = alone("training")
    results, weights = on_four_ranks(THREE_STEPS, layout)
    for losses, norms, evaluation, _ in results:
        np.testing.assert_allclose(losses, expected.losses, rtol=1e-5)
        np.testing.assert_allclose(norms, expected.norms, rtol=1e-5)
        np.testing.assert_allclose(evaluation, expected.evaluation, rtol=1e-5)
    for name, found in weights.items():
        change = np.linalg.norm(expected.weights[name] - begin[name])
        assert np.linalg.norm(found - expected.weights[name]) <= 1e-4 * change + 2.0**-22 * np.linalg.norm(found), name


@pytest.mark.parametrize(
    "layout", ["ep2, ZeRO 1", "ep4, ZeRO 2", "tp2, ep2", "tp2, ep1 folded", "tp2, ep4 folded", "pp2, ep2"]
)
def test_norm_in_bf16(layout: str):
    """The bf16 optimizer's own norm: experts counted twice, or by half of their ranks, are an error of almost 1 %."""
    expected = alone("bf16")[0].norms
    results = run(4, runs.train, values(BF16, LAYOUTS[layout]), 4)
    for _, norms, *_ in results:
        np.testing.assert_allclose(norms, expected, rtol=2e-3)
