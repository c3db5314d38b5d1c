"""Written on any layout, read on any other: every state of every tensor is bitwise what it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from megatron.checkpoint import Fragment, open_checkpoint, save
from megatron.checkpoint.format.container import DTYPES
from megatron.checkpoint.format.table import DTYPE_ORDER
from megatron.parallel.layout.layout import Layout
from tests.checkpoint.model import Model, Together, fragments, meta
from tests.selection import covering

LAYOUTS = {
    "one": Layout(),
    "dp2-zero1": Layout(data=2, zero_stage=1),
    "dp4-zero3": Layout(data=4, zero_stage=3),
    "tp2": Layout(tensor=2),
    "tp4-dp2-zero2": Layout(tensor=4, data=2, zero_stage=2),
    "tp8": Layout(tensor=8),
    "pp3-uneven": Layout(pipeline=3),
    "tp2-pp2-dp2-zero1": Layout(tensor=2, pipeline=2, data=2, zero_stage=1),
    "tp3-dp2-zero3": Layout(tensor=3, data=2, zero_stage=3),
}


def write(directory: Path, model: Model, layout: Layout, step: int = 10) -> Path:
    together = Together(layout.world_size)
    results = together.run(
        lambda member: save(directory, step, fragments(model, layout, member.rank), meta(step), member)
    )
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results[0]


@pytest.fixture(scope="module", params=[("adamw", False), ("muon", True)], ids=["adamw-untied", "muon-tied"])
def model(request) -> Model:
    return Model(seed=3, optimizer=request.param[0], tied=request.param[1])


@pytest.fixture(scope="module")
def checkpoints(model, tmp_path_factory) -> dict:
    return {name: write(tmp_path_factory.mktemp(name), model, layout) for name, layout in LAYOUTS.items()}


@pytest.mark.parametrize(("target", "source"), covering(LAYOUTS, LAYOUTS, every=3))
def test_any_layout_to_any_layout(checkpoints, model, source, target):
    checkpoint = open_checkpoint(checkpoints[source])
    layout = LAYOUTS[target]
    for rank in range(layout.world_size):
        expected = fragments(model, layout, rank, replicas=True)
        filled = [Fragment.empty(each.spec, each.data.dtype) for each in expected]
        for fragment in filled:
            fragment.data.view(torch.uint8).fill_(0xAB)
        assert checkpoint.read_into(filled, threads=1) == []
        for wanted, got in zip(expected, filled, strict=True):
            assert torch.equal(wanted.data.view(torch.uint8), got.data.view(torch.uint8)), wanted.spec


@pytest.mark.parametrize("target", LAYOUTS)
def test_new_tensors_are_what_is_read_into_others(checkpoints, model, target):
    checkpoint = open_checkpoint(checkpoints["tp2-pp2-dp2-zero1"])
    for rank in range(LAYOUTS[target].world_size):
        expected = fragments(model, LAYOUTS[target], rank, replicas=True)
        for wanted, got in zip(expected, map(checkpoint.read, [each.spec for each in expected]), strict=True):
            assert torch.equal(wanted.data, got.data) and wanted.data.dtype == got.data.dtype


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_ranks_together_want_everything(checkpoints, model, name):
    checkpoint = open_checkpoint(checkpoints["tp2-pp2-dp2-zero1"], verify="checksums")
    layout = LAYOUTS[name]
    results = Together(layout.world_size).run(
        lambda member: checkpoint.check(
            [each.spec for each in fragments(model, layout, member.rank)], communicator=member
        )
    )
    assert results == [None] * layout.world_size


def test_files_open_with_the_safetensors_library(checkpoints, model):
    """Another reader of the format sees the values, aligned and without gaps."""
    seen = 0
    for path in sorted(checkpoints["tp4-dp2-zero2"].glob("data/*/*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():
                if key == "__table__":
                    continue
                state, name, cut = key.split(":")
                rank, rest = cut.split("/")
                ranks, start = rest.split("@")
                tensor = next(each for each in model.tensors if each.name == name)
                values, begin = file.get_tensor(key), int(start)
                expected = model.shard(tensor, state, int(rank), int(ranks))[begin : begin + len(values)]
                assert torch.equal(values, expected)
                seen += len(values)
    assert seen == sum(values.numel() for values in model.values.values())


def test_every_fragment_is_aligned(checkpoints):
    """Types of different widths share files. Readers that map them need whole multiples."""
    for path in checkpoints.values():
        checkpoint = open_checkpoint(path)
        for row in checkpoint.index.rows:
            assert row["offset"] % DTYPES[DTYPE_ORDER[row["dtype"]]].itemsize == 0


def test_replicas_are_written_once(checkpoints, model):
    for path in checkpoints.values():
        checkpoint = open_checkpoint(path)
        assert int(checkpoint.index.rows["length"].sum()) == sum(values.numel() for values in model.values.values())
