"""Tensor parallel ranks on a grid of rows, columns and depth, against one process."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.checkpoint.format.fragment import FragmentSpec, rectangles
from megatron.checkpoint.format.table import tensor_from_dict, tensor_to_dict
from megatron.config.sections.model import NormOptions
from megatron.model.norm import Norm
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from megatron.parallel.layout.shard import LogicalTensor, Role, Shard
from megatron.testing import check_layouts
from megatron.testing.checks import part_of
from tests.checkpoint.brute import local_shard
from tests.float64 import EXACT
from tests.model.parity import relative
from tests.workers import run

LLAMA: dict[str, Any] = {
    "model": {
        "layers": "attention/mlp x2",
        "hidden_size": 16,
        "vocab_size": 61,
        "attention": {"heads": 4, "kv_heads": 2},
        "mlp": {"gated": True, "activation": "silu", "hidden_size": 24},
        "norm": {"type": "rmsnorm"},
    },
    "training": {"steps": 1, "sequence_length": 12, "micro_batch_size": 1, "global_batch_size": 4},
    "precision": {"compute": "fp32"},
    "zero": {"stage": 0},
}


def grid(rows: int, columns: int, depth: int = 1, **others: Any) -> dict[str, Any]:
    parallel = {"tensor": rows, "columns": columns, "depth": depth, **others}
    return {"parallel": parallel, "ranks": rows * columns * depth * others.get("pipeline", 1)}


def test_losses_and_gradients_are_those_of_one_process():
    check_layouts(LLAMA, [grid(2, 2), grid(1, 2, 2), grid(1, 4), {**grid(1, 2, pipeline=2), "zero": {"stage": 1}}])


def normed_on_a_rank(layout: Layout, form: str, x: Tensor, of_y: Tensor) -> tuple[int, list[Tensor]]:
    """(column, [result, gradients of the input and of the weight])."""
    mesh = Mesh.build(layout).of_blocks
    make = ParameterFactory(mesh, dtype=torch.float64)
    norm = Norm(make, x.shape[-1], NormOptions(type=form), partial=False)
    mine = x.chunk(mesh.columns.size, -1)[mesh.columns.rank].clone().requires_grad_()
    y = norm(mine)
    y.backward(of_y.chunk(mesh.columns.size, -1)[mesh.columns.rank])
    return mesh.columns.rank, [y.detach(), mine.grad, norm.weight.grad]


@pytest.mark.parametrize("form", ["rmsnorm", "layernorm"])
def test_a_norm_sees_all_channels(form: str):
    """Parts with other means and sizes: norms of each part by itself would be far off."""
    draw = torch.Generator().manual_seed(5)
    x, of_y = (torch.randn((3, 8), generator=draw, dtype=torch.float64) for _ in range(2))
    x = (x * torch.tensor([1.0] * 4 + [9.0] * 4, dtype=torch.float64) + torch.arange(8) // 4 * 5).requires_grad_()
    norm = Norm(ParameterFactory(Mesh.single(), dtype=torch.float64), 8, NormOptions(type=form), partial=False)
    y = norm(x)
    y.backward(of_y)
    for column, found in run(4, normed_on_a_rank, Layout(tensor=4, columns=2), form, x.detach(), of_y):
        for mine, whole in zip(found, (y.detach(), x.grad, norm.weight.grad), strict=True):
            assert relative(mine, whole.chunk(2, -1)[column]) < EXACT


def test_a_cut_in_two_directions_covers_the_tensor():
    """Every element once, by spans and by the rectangles that checkpoints read, in whole and in pieces."""
    shape, cut = (12, 6), Shard(0, (8, 4), 2, across=1, columns=3)
    tensor = LogicalTensor("a", shape, Role.HIDDEN, cut)
    values, seen = np.arange(72).reshape(shape), np.zeros(72, int)
    for rank in range(6):
        mine = local_shard(values, tensor, rank, 6)
        assert (part_of(values, tensor, rank, 6) == mine).all() and mine.size == 12
        for first in range(0, 12, 5):
            spec = FragmentSpec.whole(tensor, "weight", rank, 6).part(first, min(5, 12 - first))
            for each in rectangles(spec):
                for row in range(each.rows):
                    begin = each.local + row * each.stride
                    there = values[each.row + row, each.column : each.column + each.columns]
                    assert (mine[first + begin : first + begin + each.columns] == there).all()
                    seen[there] += 1
    assert (seen == 1).all()
    assert tensor_from_dict(json.loads(json.dumps(tensor_to_dict(tensor)))) == tensor
    for wrong in ({"columns": 4}, {"across": 2}, {"across": None}, {"columns": 0}):
        values_of = tensor_to_dict(tensor)
        with pytest.raises(ValueError, match="is cut by"):
            tensor_from_dict({**values_of, "shard": {**values_of["shard"], **wrong}})
