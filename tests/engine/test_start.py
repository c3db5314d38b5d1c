"""Modules that a rank imports until its first step is done."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from megatron.config import resolve
from megatron.data.batch import StepBatch
from megatron.parallel.layout.mesh import Mesh
from tests.engine.deepspeed.test_traps import values_of

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
RUNS = [  # compute type, ZeRO stage, optimizer
    ("fp32", 1, "adamw"),
    ("fp32", 2, "lion"),
    ("bf16", 1, "adamw"),
    ("bf16", 1, "muon"),
    ("fp32", 1, "sgd"),
    ("fp32", 1, "ademamix"),
    ("fp32", 1, "schedule_free_adamw"),
]


def train() -> None:
    """A step of each run. Ends with status 1 where one of them has imported torch's compiler."""
    from megatron.engine.deepspeed.process import prepare_deepspeed
    from megatron.engine.engine import build_engine

    prepare_deepspeed(torch.device("cpu"))
    dist.init_process_group("gloo", rank=0, world_size=1, init_method="tcp://127.0.0.1:0")
    for compute, stage, optimizer in RUNS:
        recipe = {"optimizer": {"type": optimizer, "lr": 0.01}, "schedule": {"type": "constant"}}
        config = resolve(values_of("neox", precision={"compute": compute}, zero={"stage": stage}, **recipe), ranks=1)
        engine = build_engine(config, Mesh.single(), "cpu")
        M, S = config.training.micro_batch_size, config.training.sequence_length
        batches = config.training.global_batch_size // M
        tokens = torch.arange(batches * M * (S + 1)).view(batches, M, S + 1) % config.model.vocab_size
        engine.step(StepBatch(0, tokens, torch.arange(batches * M).view(batches, M), 0), 0.01)
        if "torch._dynamo" in sys.modules:
            sys.exit(f"{compute}, ZeRO {stage}, {optimizer}: torch._dynamo was imported")


@pytest.mark.tour
def test_a_rank_that_compiles_nothing_does_not_import_the_compiler():
    """It takes seconds of every rank's start. torch's optimizers and DeepSpeed's Muon would import it."""
    program = "from tests.engine.test_start import train; train()"
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env={**os.environ, **place}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
