"""`launch.timeout` holds for every process group, DeepSpeed's own among them."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron.config.resolution import combine
from megatron.config.source.layers import ConfigSource
from megatron.engine.engine import build_engine
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh, new_group
from tests.workers import run

MODEL = {"layers": "(attention/mlp) x2", "hidden_size": 16, "vocab_size": 32, "attention": {"heads": 2}}
MOE = {**MODEL, "layers": "(attention/moe) x2", "moe": {"experts": 2, "hidden_size": 16}}
HOLD = timedelta(seconds=77)
CASES = {
    "tensor": (MODEL, {"tensor": 2}, 1),
    "pipeline with a tied embedding": ({**MODEL, "embedding": {"tied": True}}, {"pipeline": 2}, 1),
    "pipeline and data": (MODEL, {"pipeline": 2}, 0),
    "zero 2": (MODEL, {}, 2),
    "zero 3": (MODEL, {}, 3),
    "experts": (MOE, {"expert": 2}, 1),
}


def timeouts(model: dict, parallel: dict, stage: int, ranks: int) -> list[tuple[str, timedelta]]:
    values = {
        "model": model,
        "parallel": parallel,
        "zero": {"stage": stage},
        "training": {"steps": 1, "sequence_length": 8, "micro_batch_size": 1},
        "optimizer": {"lr": 1e-3},
        "data": {"synthetic": "copy"},
    }
    config = combine([ConfigSource(values)], ranks=ranks).config
    dist.distributed_c10d._set_pg_timeout(HOLD)
    build_engine(config, Mesh.build(Layout.of(config, ranks), HOLD), "cpu")
    groups = [each for each in dist.distributed_c10d._world.pg_map if each is not dist.GroupMember.NON_GROUP_MEMBER]
    return [(each.group_name, each._get_backend(torch.device("cpu")).options._timeout) for each in groups]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_group_has_the_timeout(case):
    for found in run(4 if case == "pipeline and data" else 2, timeouts, *CASES[case], 4 if "data" in case else 2):
        assert len(found) > 1 and all(each == HOLD for _, each in found), found


def waits(seconds: float) -> str:
    """Report of rank 0 that waits for a peer which does not come."""
    group = new_group([0, 1], timedelta(seconds=seconds))
    store, said = dist.distributed_c10d._get_default_store(), ""
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(1), group=group)
        said = str(caught.value)
        store.set("has waited", "")
    store.wait(["has waited"], timedelta(seconds=600))
    return said


def test_a_collective_in_a_group_fails_after_that_time():
    assert "Timed out waiting 2000ms" in run(2, waits, 2.0)[0]
