"""What a step asks of a GPU, counted without one: kernels, waits, copies, collectives, groups (`make gpu-host`).

The host's side is real, on a stand-in that computes nothing (tests/stand_ins/gpu); no time follows from it.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from tests.stand_ins.gpu.cases import CASES, TABLE, count, row

pytestmark = [
    pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this torch is built without CUDA: `make gpu-host`"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, whose libraries are in the way"),
    pytest.mark.skipif(not (shutil.which("g++") and shutil.which("nm")), reason="g++ and nm build the stand-in"),
]
ADVICE = "if that is meant: python -m tests.stand_ins.gpu.cases --write"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    from tests.stand_ins.gpu.build import build

    return build(tmp_path_factory.mktemp("gpu"))


@pytest.mark.parametrize("name", CASES)
def test_a_step_asks_no_more_of_a_gpu_than_before(name, environment):
    expected, found = json.loads(TABLE.read_text())[name], row(count(name, environment))
    assert found.pop("kernels") <= expected.pop("kernels"), ADVICE
    assert found == expected, ADVICE
