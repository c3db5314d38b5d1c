"""Every architecture on every layout of tests/layouts.yml: the numbers of one process of plain PyTorch."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest

from tests.training import runs
from tests.training.matrix import Case, cases
from tests.workers import run


@cache
def plain(values: str) -> tuple[runs.Outcome, dict[str, np.ndarray]]:
    return runs.plainly(json.loads(values)), runs.initial(json.loads(values))


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_numbers_of_one_process(case: Case):
    expected, begin = plain(json.dumps(case.plain))
    results = run(case.ranks, runs.train, case.values, case.ranks)
    for losses, norms, evaluation, _ in results:
        np.testing.assert_allclose(losses, expected.losses, rtol=case.bounds.loss, err_msg="losses")
        np.testing.assert_allclose(norms, expected.norms, rtol=case.bounds.norm, err_msg="gradient norms")
        np.testing.assert_allclose(evaluation, expected.evaluation, rtol=case.bounds.loss, err_msg="evaluation")
    weights = {name: values for (name, _), values in runs.assemble([result[3] for result in results]).items()}
    assert weights.keys() == expected.weights.keys()
    for name, values in weights.items():
        change = np.linalg.norm(expected.weights[name] - begin[name])
        assert change > 0, f"{name} did not learn, so this proves nothing of it"
        error = np.linalg.norm(values - expected.weights[name])
        assert error <= case.bounds.weights * np.linalg.norm(values), f"{name}: off by {error:.1e}"
        rounding = 2**-22 * np.linalg.norm(values)  # two units in the last place, where it hardly moved
        assert error <= case.bounds.change * change + rounding, f"{name}: off by {error / change:.1e} of its change"
