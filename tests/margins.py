"""How much room comparisons leave: the error that each saw as a share of its bound.

`pytest --margins=FILE` appends a line of JSON for each comparison of numbers (`relative(...) < bound`,
`pytest.approx`, `assert_close`, `assert_allclose`). `python -m tests.margins FILE ...` then shows the tests that saw an
error of more than a tenth of the bound in any of the runs: on another processor they may fail. Equal bits are no
comparison, and bounds of statistics, counts and bytes (wider than 1e-3) are no matter of rounding.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

ROOM = 10.0
_file: Path | None = None


class Measured(float):
    """A relative error, whose comparison with a bound is recorded."""

    def __lt__(self, bound: float) -> bool:
        record(float(self), float(bound))
        return float(self) < bound


def record(error: float, bound: float) -> None:
    if _file is not None:
        test = os.environ.get("PYTEST_CURRENT_TEST", "?").rsplit(" (", 1)[0]
        with _file.open("a") as lines:
            lines.write(json.dumps({"test": test, "error": error, "bound": bound}) + "\n")


def start(path: str) -> None:
    """Record the comparisons of this process in the file."""
    global _file
    _file = Path(path).absolute()
    torch.testing.assert_close = _watched(torch.testing.assert_close, _of_torch)
    np.testing.assert_allclose = _watched(np.testing.assert_allclose, _of_numpy)
    approximation = type(pytest.approx(1.0))
    equal = approximation.__eq__

    def scalar(self, actual) -> bool:
        if isinstance(actual, int | float) and not isinstance(actual, bool):
            scale = max(abs(self.expected), 1e-300)
            record(abs(actual - self.expected) / scale, self.tolerance / scale)
        return equal(self, actual)

    approximation.__eq__ = scalar


def _watched(function: Callable, measure: Callable) -> Callable:
    def watched(actual, expected, *args, **kwargs):
        measure(actual, expected, *args, **kwargs)
        return function(actual, expected, *args, **kwargs)

    return watched


def _of_torch(actual, expected, *_, rtol=None, atol=None, **__) -> None:
    if isinstance(actual, torch.Tensor) and actual.is_floating_point():
        if rtol is None:
            rtol, atol = (1e-7, 1e-7) if actual.dtype == torch.float64 else (1.3e-6, 1e-5)
        _of_numpy(actual.detach().double().numpy(), expected.detach().double().numpy(), rtol, atol)


def _of_numpy(actual, expected, rtol=1e-7, atol=0.0, **_) -> None:
    actual, expected = (np.asarray(each, dtype=np.float64) for each in (actual, expected))
    if np.broadcast_shapes(actual.shape, expected.shape) and actual.size:
        scale = np.abs(expected) + 1e-300
        bound, error = atol / scale + rtol, np.abs(actual - expected) / scale
        worst = np.unravel_index(np.argmax(error / np.maximum(bound, 1e-300)), error.shape)
        record(float(error[worst]), float(np.broadcast_to(bound, error.shape)[worst]))


def narrow(paths: list[str], room: float = ROOM) -> dict[str, tuple[float, float]]:
    """Test -> (error, bound) of its narrowest comparison, over all runs, where bound < room * error."""
    worst: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 1.0))
    for path in paths:
        for line in Path(path).read_text().splitlines():
            found = json.loads(line)
            error, bound = found["error"], found["bound"]
            if 0.0 < bound <= 1e-3 and error / bound > worst[found["test"]][0] / worst[found["test"]][1]:
                worst[found["test"]] = (error, bound)
    return {test: pair for test, pair in worst.items() if pair[1] < room * pair[0]}


if __name__ == "__main__":
    found = narrow(sys.argv[1:])
    for test, (error, bound) in sorted(found.items(), key=lambda item: item[1][1] / item[1][0]):
        print(f"{bound / error:6.1f}x  error {error:.1e}  bound {bound:.0e}  {test}")
    print(f"{len(found)} tests leave less than {ROOM:.0f} times the error that was seen")
