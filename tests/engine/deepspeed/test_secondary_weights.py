"""ZeRO 3 with a second copy of the weights in each pair of ranks (ZeRO++'s hpZ, `zero_hpz_partition_size`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.test_traffic import counted
from tests.training import runs
from tests.training.matrix import cases, merged
from tests.workers import run

RANKS, PAIR = 8, 2


def values_of(stage: int, **deepspeed: Any) -> dict[str, Any]:
    """No weights stay gathered from one pass to the other, so that both gather them."""
    case = next(case for case in cases() if case.name == "fp32: llama on dp2, ZeRO 3, one micro-batch")
    zero = {"stage": stage, "persistent_size": 100, "prefetch_size": 3000}
    own = {"training": {"micro_batch_size": 1, "global_batch_size": RANKS}, "zero": zero}
    return merged(case.values, own, {"deepspeed": {"zero_optimization": deepspeed}} if deepspeed else {})


@pytest.mark.slow  # three jobs of 8 ranks
def test_a_step_is_that_of_zero_1_and_gathers_within_pairs():
    """On 8 ranks: losses, norms, evaluation and weights, and the backward pass sends its weights only inside pairs."""
    paired = values_of(3, zero_hpz_partition_size=PAIR, stage3_max_reuse_distance=0, stage3_max_live_parameters=0)
    plain, found = (run(RANKS, runs.train, each, RANKS) for each in (values_of(1), paired))
    for one, other in zip(plain, found):
        assert other[0] == pytest.approx(one[0], rel=1e-6) and other[1] == pytest.approx(one[1], rel=1e-5)
        assert other[2] == pytest.approx(one[2], rel=1e-6)
    exact, weights = (runs.assemble([each[3] for each in told]) for told in (plain, found))
    for name, tensor in exact.items():
        assert np.linalg.norm(weights[name] - tensor) <= 1e-6 * np.linalg.norm(tensor), name
    gathers = {
        (phase.replace("recompute", "backward"), ranks)
        for phase, _, _, ranks, operation, *_ in run(RANKS, counted, paired, RANKS, 3)[0][-1]
        if operation == "all_gather" and phase != "update"
    }
    assert gathers == {("forward", RANKS), ("backward", PAIR)}
