"""What a step asks of a GPU, counted without one: kernels, waits, copies, collectives, groups (`make gpu-host`).

The host's side is real, on a stand-in that computes nothing (tests/stand_ins/gpu); no time follows from it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from tests.paths import ROOT
from tests.stand_ins.gpu import layouts
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


PINNED = """
import ctypes, os
import torch
from megatron.config import resolve
from megatron.training.run import _prepare_torch
watcher = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_long)
watch = watcher(lambda kind, name, size: print(size) if kind == b"pinned memory" else None)
ctypes.CDLL(os.environ["LD_PRELOAD"]).stand_in_watch(watch)
model = {"layers": "attention/mlp", "hidden_size": 8, "vocab_size": 9, "attention": {"heads": 2}}
_prepare_torch(resolve({"model": model, "training": {"steps": 1, "sequence_length": 4}}))
torch.empty((5 << 20) + 1, dtype=torch.uint8, pin_memory=True)
"""


def test_pinned_memory_is_not_rounded_up_to_a_power_of_two(environment):
    command = [sys.executable, "-c", PINNED]
    done = subprocess.run(command, env={**os.environ, **environment}, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == [str((5 << 20) + 1)], done.stderr


@pytest.fixture(scope="module")
def of_layouts(environment):
    return layouts.count(layouts.recorded(), environment)


@pytest.mark.parametrize("name", CASES)
def test_a_step_asks_no_more_of_a_gpu_than_before(name, environment):
    expected, found = json.loads(TABLE.read_text())[name], row(count(name, environment))
    assert found.pop("kernels") <= expected.pop("kernels"), ADVICE
    assert found == expected, ADVICE


@pytest.mark.parametrize("architecture", layouts.recorded())
def test_nor_does_an_architecture_on_any_class_of_layouts(architecture, of_layouts):
    expected, found = json.loads(layouts.TABLE.read_text())[architecture], of_layouts[architecture]
    assert found.keys() == expected.keys()
    for name, own in found.items():
        assert isinstance(own, dict), f"{name}: {own}"
        assert own.pop("kernels") <= expected[name].pop("kernels"), f"{name}. {layouts.ADVICE}"
        assert own == expected[name], f"{name}. {layouts.ADVICE}"


def test_nor_do_an_evaluation_a_save_and_a_resume(environment):
    expected, found = json.loads(layouts.LIVES.read_text()), layouts.lives(layouts.LIVED, environment)
    for name, parts in found.items():
        for part, own in parts.items():
            assert own.pop("kernels") <= expected[name][part].pop("kernels"), f"{name}, {part}. {layouts.ADVICE}"
    assert found == expected, layouts.ADVICE
