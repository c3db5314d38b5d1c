"""Calls of a GPU in a step, counted without one: kernels, waits, copies, collectives, groups (`make gpu-host`).

The host's side is real, on a stand-in that computes nothing (tests/stand_ins/gpu). No time follows from it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from megatron.config.arithmetic.machine import installed
from tests.paths import ROOT
from tests.stand_ins.gpu import layouts
from tests.stand_ins.gpu.cases import CASES, TABLE, counts, row

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


BYTES = """
import os, sys
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from megatron.config import resolve
from megatron.data.batch import StepBatch
from megatron.engine import base
from megatron.engine.deepspeed.process import prepare_deepspeed
from megatron.engine.engine import build_engine
from megatron.parallel.layout.mesh import Mesh

class Traffic(TorchDispatchMode):
    kept, bytes = set(), 0

    def count(self, written, read):  # once for each time that a tensor is written or read
        tensors = [[each for each in tree_leaves(some) if isinstance(each, torch.Tensor)] for some in (written, read)]
        if any(each.untyped_storage().data_ptr() in self.kept for some in tensors for each in some):
            self.bytes += sum(each.nbytes for some in tensors for each in some)

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        schema, given = function._schema, [*arguments, *(options or {}).values()]
        changes = [each.alias_info is not None and each.alias_info.is_write for each in schema.arguments]
        if any(changes) or not any(each.alias_info for each in schema.returns):
            written = [each for each, changed in zip(given, changes) if changed]
            only = function.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten.zero_, torch.ops.aten.fill_)
            self.count([written, [] if any(changes) else result], given[1:] if only else given)
        return result

os.environ["LOCAL_RANK"] = "0"
device = torch.device("cuda", 0)
prepare_deepspeed(device)
torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
torch.backends.cuda.enable_cudnn_sdp(False)
if sys.argv[1] == "apart":
    base.passes_of_adamw = lambda *_: None
config = resolve({
    "model": {"layers": "(attention/mlp) x2", "hidden_size": 64, "vocab_size": 512, "attention": {"heads": 2}},
    "training": {"steps": 9, "sequence_length": 8, "micro_batch_size": 1, "global_batch_size": 1, "compile": "off"},
    "precision": {"compute": "bf16"},
})
engine, traffic = build_engine(config, Mesh.single(), device), Traffic()
zero = engine.deepspeed.optimizer
def step():
    engine.step(StepBatch(0, torch.zeros((1, 1, 9), dtype=torch.int64), torch.zeros((1, 1), dtype=torch.int64), 0), 0.1)
kernels, flats = engine.optimizer.kernels, [*zero.fp32_groups_flat_partition, *zero.fp32_groups_gradients_flat]
if kernels is not None:
    add, update, of, sums_of = kernels.add, kernels.update, kernels.Sums.of, {}
    def made(totals, places, begin):
        sums = of(totals, places, begin)
        sums_of[sums] = totals, [each for each, new in zip(totals, begin) if not new]
        return sums
    def adds(sums, gradients, squares):
        totals, read = sums_of[sums]
        traffic.count([*totals, squares], [*gradients, *read])
        add(sums, gradients, squares)
    def updates(group, master, narrow, states, bad, scale):
        both = [master, states["exp_avg"], states["exp_avg_sq"]]
        traffic.count([both, narrow], [both, master.grad])
        update(group, master, narrow, states, bad, scale)
    kernels.add, kernels.update, kernels.Sums.of = adds, updates, made
step()
states = [part for each in engine.optimizer.state.values() for part in each.values() if part.dim()]
traffic.kept = {each.untyped_storage().data_ptr() for each in (*flats, *states)}
with traffic:
    step()
print(traffic.bytes / sum(each.numel() for each in engine.module.parameters()))
"""


@pytest.mark.parametrize(("way", "most"), [("kernels", 36), ("apart", 48)])
def test_bytes_of_an_update(environment, way, most):
    """Of each parameter, by all operations on fp32 masters, sums and moments: 6 for the copy, 30 for AdamW and the
    16-bit weights. In kernels of torch the norm and the 16-bit weights read 8 more, and clipping writes 4."""
    command = [sys.executable, "-c", BYTES, way]
    done = subprocess.run(command, env={**os.environ, **environment}, cwd=ROOT, capture_output=True, text=True)
    assert most <= float(done.stdout.split()[-1]) < 1.01 * most, done.stderr[-2000:]


@pytest.mark.skipif(not installed("fla"), reason="needs fla")
def test_kept_kernels_compile_for_gpus_of_both_makes(environment):
    command = [sys.executable, "-m", "tests.stand_ins.gpu.compiled"]
    done = subprocess.run(command, env={**os.environ, **environment}, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) > 20
    assert not {name: each for name, each in found.items() if set(each.values()) != {"compiled"}}


@pytest.fixture(scope="module")
def of_layouts(environment):
    return layouts.count(layouts.recorded(), environment)


@pytest.fixture(scope="module")
def of_cases(environment):
    return counts(CASES, environment)


@pytest.mark.parametrize("name", CASES)
def test_a_step_asks_no_more_of_a_gpu_than_before(name, of_cases):
    expected, found = json.loads(TABLE.read_text())[name], row(of_cases[name])
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
