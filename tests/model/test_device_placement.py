"""Every kind of model keeps its work on its device and reads no value of it: shown with CUDA tensors without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.model.pretended_gpu import SOME
from tests.selection import toured

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(ROOT.glob("configs/test/tiny_*.yml"))

pytestmark = pytest.mark.skipif(
    torch.backends.cuda.is_built(), reason="this torch has CUDA: its own guard and engine are there"
)


@pytest.fixture(scope="module")
def found(request) -> dict[str, str]:
    """Of the models of this run's cases."""
    wanted = {each.callspec.params["model"] for each in request.session.items if each.path == Path(__file__)}
    program = Path(__file__).with_name("pretended_gpu.py")
    done = subprocess.run(
        [sys.executable, program, *(file for file in FILES if file.stem in wanted)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


CASES = [
    *((file.stem, trial) for file in FILES for trial in ("train", "decode")),
    *((model, trial) for trial, models in SOME.items() for model in sorted(models)),
]


@pytest.mark.parametrize(("model", "trial"), toured(CASES, "layouts"))
def test_all_on_the_device_and_without_waiting_for_it(model, trial, found):
    assert found[f"{model}-{trial}"] == ""
