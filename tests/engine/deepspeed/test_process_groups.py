"""A rank makes the process groups that it is in, and no others: counted at the size of a large run."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.config import load
from megatron.engine.deepspeed.process import prepare_deepspeed
from megatron.engine.deepspeed.without_values import without_values
from megatron.engine.engine import build_engine
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from megatron.rehearsal.command import PRELOADED
from megatron.rehearsal.rank import _group_of_nobody
from tests.paths import ROOT

LAYOUTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "tp8 pp8 cp2 ep8 dp64": ("moe", {"tensor": 8, "pipeline": 8, "context": 2, "expert": 8}, 8192),
    "tp2 pp8 dp512, ZB-V, ZeRO 3": (
        "llama",
        {"tensor": 2, "pipeline": 8, "schedule": "zbv", "stages_per_rank": 2},
        8192,
    ),
    "tp2 pp2 dp2": ("llama", {"tensor": 2, "pipeline": 2}, 8),
    "pp2 dp2": ("llama", {"pipeline": 2}, 4),
}


def made(name: str, rank: int) -> list[tuple[int, ...]]:
    """The members of each group that a rank makes on its way to an engine, in order."""
    model, parallel, ranks = LAYOUTS[name]
    overrides = [f"parallel.{axis}={size}" for axis, size in parallel.items()]
    if parallel.get("tensor") == 8:
        overrides += ["model.attention.heads=16", "model.hidden_size=128", "model.layers=(attention/moe) x8"]
        overrides += ["model.moe.experts=8", "model.moe.hidden_size=64"]
    if "schedule" in parallel:
        overrides += ["model.layers=(attention/mlp) x16", "zero.stage=3"]
    overrides += [f"training.global_batch_size={2 * ranks}", "training.micro_batch_size=1", "precision=bf16"]
    files = [ROOT / f"configs/test/tiny_{model}.yml"]
    config = load(files, overrides, ranks=ranks, check_inputs=False, here=False).config
    prepare_deepspeed(torch.device("cpu"))
    groups, plain = [], dist.new_group

    def new_group(members=None, *arguments, **options):
        groups.append(tuple(members))
        return plain(members, *arguments, **options)

    with _group_of_nobody(ranks, rank), without_values(), mock.patch.object(dist, "new_group", new_group):
        build_engine(config, Mesh.build(Layout.of(config, ranks)), "cpu", values=False)
    return groups


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_makes_no_group_that_it_is_not_in_and_none_twice(name):
    rank = LAYOUTS[name][2] // 2 + 1
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, context) as pool:
        groups = pool.submit(made, name, rank).result()
    assert [group for group in groups if rank not in group] == []
    several = [group for group in groups if len(group) > 1]
    assert len(set(several)) == len(several) <= 8  # the mesh's seven, and the ranks of one replica of the model
    assert all(len(group) < LAYOUTS[name][2] for group in several)  # the group of all ranks is there already
