"""On gloo ranks: what a real engine's steps are counted to take, with the ledger of the rehearsal."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from megatron.config import resolve
from megatron.data.batch import StepBatch
from megatron.engine.deepspeed.process import prepare_deepspeed
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from megatron.rehearsal.rank import STEPS, RankCounts, enough_micro_batches, observe, with_micro_batches
from tests.training import runs


def counted(values: dict[str, Any], ranks: int, micro_batches: int | None = None, steps: int = STEPS) -> RankCounts:
    """This rank's steps on random tokens, with torch's attention: a rehearsal is of GPUs, and tiles are for CPUs."""
    config = resolve(values, ranks=ranks)
    layout = Layout.of(config, ranks)
    config = with_micro_batches(config, layout, micro_batches or enough_micro_batches(config, layout))
    mesh = Mesh.build(layout)
    prepare_deepspeed(torch.device("cpu"))

    def batch(step: int) -> StepBatch:
        drawn = runs.local_batch(config, step, mesh.data.rank, mesh.data.size)
        return StepBatch(**{**vars(drawn), "loss_mask": None})

    attend, rank = "megatron.kinds.common.attention.attend.TILED", "megatron.rehearsal.rank.STEPS"
    with mock.patch(attend, 0), mock.patch(rank, steps):
        return observe(config, mesh, batch)
