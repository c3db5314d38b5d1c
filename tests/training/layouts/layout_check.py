"""A run on a layout of tests/layouts.yml against one process of plain PyTorch: what the files test_layouts_*.py run."""

from __future__ import annotations

import json
import re
from functools import cache

import numpy as np

from tests.margins import Measured
from tests.training import runs
from tests.training.matrix import Case
from tests.workers import run


@cache
def plain(values: str) -> tuple[runs.Outcome, runs.Outcome, dict[str, np.ndarray]]:
    """One process, the same without its roundings, and the weights at the start."""
    values = json.loads(values)
    return runs.plainly(values), runs.plainly(values, exact=True), runs.initial(values)


def worst(found, expected) -> Measured:
    """The largest relative difference of numbers."""
    return Measured(np.max(np.abs(np.array(found) / np.array(expected) - 1.0)))


def one_token_apart(case: Case, moved: np.ndarray) -> bool:
    """Whether corrections of a 16-bit run differ by what one token makes that rounding sends to another expert.

    A step adds the sign of mean - count times a rate. Two counts may come over the mean, or onto it. Counts that are
    not summed over ranks would be wrong for most experts.
    """
    rate = case.plain["model"]["moe"]["router"].get("correction_rate", 1e-3)
    return case.plain.get("precision") == "bf16" and float(np.abs(moved).sum()) < 2.1 * rate


def compare(case: Case) -> None:
    """Train on the layout, and check what all ranks return."""
    check(case, run(case.ranks, runs.train, case.values, case.ranks))


def check(case: Case, results: list[tuple]) -> dict[str, float]:
    """Within the bounds of the recipe, and a multiple of the effect of rounding on one process. It is ten times for a
    single number, whose rounding may happen to be small (a tensor of one element is one, too). Five times for a larger
    tensor, in whose norm there is no luck.

    Args:
        results: of `runs.train` on each rank.

    Returns:
        The largest relative errors: of the losses, of the gradients' norms, and of the weights of a tensor.
    """
    expected, exact, begin = plain(json.dumps(case.plain))
    bounds, numbers = case.bounds, ([*each.losses, each.evaluation[0]] for each in (expected, exact))
    loss = bounds.loss + 10 * worst(*numbers)
    norm = bounds.norm + 10 * worst(expected.norms, exact.norms)
    found = {"loss": 0.0, "norm": 0.0, "weights": 0.0}
    for losses, norms, evaluation, _ in results:
        assert worst(losses, expected.losses) < loss and worst(norms, expected.norms) < norm
        assert worst(evaluation, expected.evaluation) < loss, "evaluation"
        found["loss"] = max(found["loss"], worst(losses, expected.losses), worst(evaluation, expected.evaluation))
        found["norm"] = max(found["norm"], worst(norms, expected.norms))
    weights = {name: values for (name, _), values in runs.assemble([result[3] for result in results]).items()}
    assert weights.keys() == expected.weights.keys()
    for name, values in weights.items():
        if re.fullmatch(r"layers\.\d+\.scale", name):  # of block_scale, which is not trained
            assert (values == begin[name]).all(), name
            continue
        if name.endswith("router.table"):  # nothing changes it
            assert np.array_equal(values, begin[name]) and np.array_equal(values, expected.weights[name])
            continue
        change = np.linalg.norm(expected.weights[name] - begin[name])
        assert change > 0, f"{name} did not learn, so this proves nothing of it"
        if name.endswith("router.correction") and one_token_apart(case, values - expected.weights[name]):
            continue
        error = np.linalg.norm(values - expected.weights[name])
        times = 10 if len(values) == 1 else 5
        spread, size = times * np.linalg.norm(exact.weights[name] - expected.weights[name]), np.linalg.norm(values)
        assert Measured(error / size) < bounds.weights + spread / size, name
        found["weights"] = max(found["weights"], float(error / size))
        spread += 2**-22 * size  # two units in the last place, where it hardly moved
        assert Measured(error / change) < bounds.change + spread / change, name
    return found
