"""A compiled model whose parameters are cut as they are made, in a process that has not imported torch's compiler."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.paths import ROOT

PROGRAM = """
import sys
import torch
from megatron.config import resolve
from megatron.engine.deepspeed.process import prepare_deepspeed
from megatron.engine.engine import build_engine
from megatron.parallel.layout.mesh import Mesh

prepare_deepspeed(torch.device("cpu"))
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
config = resolve({
    "model": {"layers": "attention/mlp", "hidden_size": 32, "vocab_size": 61, "attention": {"heads": 2}},
    "training": {"steps": 2, "sequence_length": 8, "micro_batch_size": 1, "global_batch_size": 1, "compile": "layer"},
    "zero": {"stage": 3},
})
assert "torch._dynamo" not in sys.modules
build_engine(config, Mesh.single())
print("made")
"""


def test_zero_3_compiles():
    environment = {**os.environ, "LOCAL_RANK": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines()[-1:] == ["made"], done.stderr[-2000:]
