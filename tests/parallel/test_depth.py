"""Matrices that neighbours among the replicas share by rows and gather whole, against one rank, in float64.

Training runs on such layouts are in tests/layouts.yml, and tests/engine/test_traffic.py counts their messages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megatron.config import resolve
from megatron.parallel.layers.ahead import gather_ahead
from megatron.parallel.layers.depth import linear_of_gathered
from megatron.parallel.layers.linear import ColumnLinear
from megatron.parallel.layers.parameters import ParameterFactory, logical_of, on_every_tensor_rank, shares_rows
from megatron.parallel.layout.initial import Init
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Axis, Mesh
from megatron.parallel.layout.shard import Span
from megatron.parallel.messages.traffic import SIZES, wire_bytes
from megatron.plan.messages.predict import predict
from tests.float64 import EXACT
from tests.model.parity import relative
from tests.workers import run

TOKENS, INPUTS, PARTS = 10, 6, (8, 4)
OUTPUTS = sum(PARTS)


def drawn(ranks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs of all replicas, the matrix, its bias, and the gradient of the result."""
    draw = torch.Generator().manual_seed(3)
    shapes = ((ranks, TOKENS, INPUTS), (OUTPUTS, INPUTS), (OUTPUTS,), (ranks, TOKENS, OUTPUTS))
    x, weight, bias, of_y = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    return x, weight, bias, of_y


def layer_on_a_rank(layout: Layout, dtype: torch.dtype) -> tuple[tuple[int, int], list[Tensor]]:
    """(place on tensor and depth, [rows of the matrix, result, gradients of input, own rows, bias])."""
    mesh = Mesh.build(layout)
    make = ParameterFactory(mesh, dtype=dtype)
    layer = ColumnLinear(make, INPUTS, PARTS, init=Init("normal", 1.0), bias=True)
    x, weight, bias, of_y = drawn(mesh.depth.size)
    at = mesh.depth.rank
    cut = torch.cat([torch.arange(s.start, s.stop) for s in logical_of(layer.bias).spans(*layer.bias.cut)[0]])
    rows = cut.chunk(mesh.depth.size)[at]
    with torch.no_grad():
        layer.weight.copy_(weight[rows])
        layer.bias.copy_(bias[cut])
    mine = x[at].to(dtype).requires_grad_()
    y = layer(mine)
    y.backward(of_y[at][:, cut].to(dtype))
    assert torch.equal(layer.matrix(), weight[cut].to(dtype))
    return (mesh.tensor.rank, at), [rows, y.detach(), mine.grad, layer.weight.grad, layer.bias.grad]


@pytest.mark.parametrize("layout", [Layout(data=4, depth=4, expert=4), Layout(tensor=2, data=2, depth=2, expert=2)])
def test_a_layer_is_that_of_one_rank(layout: Layout):
    x, weight, bias, of_y = (each.clone().requires_grad_() for each in drawn(layout.depth))
    y = F.linear(x, weight, bias)
    y.backward(of_y.detach())
    for (tensor, at), (rows, own_y, dx, of_own, of_bias) in run(4, layer_on_a_rank, layout, torch.float64):
        assert relative(of_own, weight.grad[rows]) < EXACT
        if layout.tensor == 1:
            assert relative(own_y, y[at]) < EXACT and relative(dx, x.grad[at]) < EXACT
            assert relative(of_bias, of_y[at].sum(0)) < EXACT  # what data parallel ranks sum, too
        else:  # of each part, the half of this tensor parallel rank
            cut = torch.cat([each.chunk(2)[tensor] for each in torch.arange(OUTPUTS).split(PARTS)])
            assert relative(own_y, y[at][:, cut]) < EXACT
            assert relative(dx, of_y[at][:, cut] @ weight[cut]) < EXACT


@contextlib.contextmanager
def noted() -> Iterator[list[str]]:
    """The order of messages, waits and products inside."""
    found = list[str]()

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found.extend(["product"] if function is torch.ops.aten.mm.default else [])
            return function(*args, **(kwargs or {}))

    def watched(name: str, function: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            work = function(*args, **more)
            found.append(name)
            return SimpleNamespace(wait=lambda: (found.append(f"{name} ends"), work.wait()))

        return call

    with pytest.MonkeyPatch.context() as patch, Products():
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
            patch.setattr(dist, name, watched(name.split("_")[1], getattr(dist, name)))
        yield found


def events_on_a_rank(layout: Layout) -> list[str]:
    mesh = Mesh.build(layout)
    own, x = torch.randn(2, INPUTS, requires_grad=True), torch.randn(TOKENS, INPUTS, requires_grad=True)
    y = linear_of_gathered(x, own, None, mesh.depth)
    with noted() as found:
        y.sum().backward()
    return found


def test_messages_of_the_backward_pass_travel_under_its_products():
    order = ["gather", "product", "scatter", "gather ends", "product", "scatter ends"]
    assert run(2, events_on_a_rank, Layout(data=2, depth=2, expert=2)) == [order] * 2


class Three(nn.Module):
    """Three products. A pass may omit the second, or raise before the last."""

    def __init__(self, axis: Axis, ahead: bool) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(axis.rank)
        self.axis = axis
        self.own = nn.ParameterList(torch.randn(INPUTS // 2, INPUTS, generator=draw) / INPUTS for _ in range(3))
        if ahead:
            gather_ahead(self, again=True)

    def forward(self, x: Tensor, way: str = "all") -> Tensor:
        for number, own in enumerate(self.own):
            if way == "raises" and number == 2:
                raise ValueError("ends")
            if way == "all" or number != 1:
                x = linear_of_gathered(x, own, None, self.axis).tanh()
        return x


def passes_on_a_rank(layout: Layout, ahead: bool) -> tuple[list[str], list[Tensor], list[tuple[int, int]]]:
    """(events of the last training pass, losses and weights, gathers of each pass that were begun and that ended)."""
    axis = Mesh.build(layout).depth
    block, found, gathers = Three(axis, ahead), list[Tensor](), list[tuple[int, int]]()
    draw = torch.Generator().manual_seed(5 + axis.rank)
    for _ in range(3):
        with noted() as events:
            again = checkpoint(block, torch.randn(TOKENS, INPUTS, generator=draw), use_reentrant=False)
            kept = block(torch.randn(TOKENS, INPUTS, generator=draw))  # two micro-batches in flight
            found.extend([again.sum().detach(), kept.sum().detach()])
            kept.sum().backward()
            again.sum().backward()
        gathers.append((events.count("gather"), events.count("gather ends")))
        with torch.no_grad(), noted() as evaluated:
            for own in block.own:
                own -= own.grad
            for way in ("all", "some", "some", "raises", "all"):
                with contextlib.suppress(ValueError):
                    found.append(block(torch.randn(TOKENS, INPUTS, generator=draw), way))
        gathers.append((evaluated.count("gather"), evaluated.count("gather ends")))
    with noted() as events:
        block(torch.randn(TOKENS, INPUTS, generator=draw))
    return events, [*found, *(each.detach() for each in block.own)], gathers


def test_gathers_of_the_forward_pass_travel_under_the_product_before():
    layout = Layout(data=2, depth=2, expert=2)
    plain, ahead = run(2, passes_on_a_rank, layout, False), run(2, passes_on_a_rank, layout, True)
    for (_, values, counts), (events, own_values, own_counts) in zip(plain, ahead):
        assert events == ["gather", *["gather", "gather ends", "product"] * 2, "gather ends", "product"]
        assert all(map(torch.equal, values, own_values)) and len(values) == len(own_values)
        assert own_counts[::2] == counts[::2]  # a training pass and its repetition send what they sent
        assert all(begun == ended for begun, ended in own_counts)


def test_gradients_of_16_bits_are_summed_in_fp32():
    layout = Layout(data=4, depth=4, expert=4)
    x, _, _, of_y = drawn(4)
    expected = sum((of_y[rank].bfloat16().T @ x[rank].bfloat16()).float() for rank in range(4)).bfloat16()
    found = torch.cat([each[1][3] for each in run(4, layer_on_a_rank, layout, torch.bfloat16)])
    assert torch.equal(found, expected)


def test_rows_that_some_rank_cannot_divide_stay_whole():
    make = ParameterFactory(Mesh.describe(Layout(tensor=2, data=4, depth=4, expert=4), 3), device="meta")
    init = Init("normal", 0.02)
    assert ColumnLinear(make.scope("a"), 6, (8,), init=init).weight.shape == (1, 6)
    assert not shares_rows(ColumnLinear(make.scope("b"), 6, (12,), init=init).weight)
    keys = ColumnLinear(make.scope("c"), 6, (8,), init=init, shard=False).weight
    assert keys.shape == (2, 6) and on_every_tensor_rank(keys)


def test_runs_of_a_cut_matrix_cover_it():
    """Rows of a fused matrix that tensor parallel ranks cut part by part, in runs that cross the parts."""
    make = ParameterFactory(Mesh.describe(Layout(tensor=2, data=3, depth=3, expert=3), 0), device="meta")
    tensor = logical_of(ColumnLinear(make, 6, PARTS, init=Init("normal", 0.02)).weight)
    places = [
        row
        for rank in range(2)
        for run_ in range(3)
        for span in tensor.spans(rank, 2, Span(2 * run_, 2, 0))[0]
        for row in range(span.start, span.stop)
    ]
    assert places == [0, 1, 2, 3, 8, 9, 4, 5, 6, 7, 10, 11]


GOLDEN = {  # of a block of H = 1024 and T = 16,384 tokens of all ranks: elements on rows, on columns and on depth
    (8, 1, 1): (117_440_512, 0, 0),
    (1, 8, 1): (0, 352_321_536, 0),
    (1, 1, 8): (0, 0, 33_030_144),
    (2, 4, 1): (16_777_216, 150_994_944, 0),
    (4, 2, 1): (50_331_648, 50_331_648, 0),
    (2, 2, 2): (16_777_216, 50_331_648, 4_718_592),
    (4, 1, 2): (50_331_648, 0, 4_718_592),
    (1, 4, 2): (0, 150_994_944, 4_718_592),
    (2, 1, 4): (4 * 4096 * 1024, 0, 3 * 3 * 12 * 1024**2 // 4 // 2),
}


@pytest.mark.parametrize("rows, columns, depth", GOLDEN)
def test_numbers_on_the_wire_are_those_of_the_paper(rows: int, columns: int, depth: int):
    """Per rank, as AxoNN's own layers send them (Singh et al. 2023): sums over columns of a block's 8 H outputs over
    the rows, forward, and of the inputs of attention's output and the down projection, backward. Also sums over rows of
    the stream, and two gathers and a scatter of 12 H^2 numbers over depth. An all-reduce of m over n sends 2 (n - 1) /
    n m, the others half. Exact norms send two numbers more per token and norm."""
    config = resolve(
        {
            "model": {
                "layers": "attention/mlp",
                "hidden_size": 1024,
                "vocab_size": 64,
                "attention": {"heads": 8},
                "norm": {"type": "rmsnorm"},
            },
            "parallel": {"tensor": {"rows": rows, "columns": columns, "depth": depth}},
            "training": {"steps": 1, "sequence_length": 2048, "micro_batch_size": 8 // depth, "global_batch_size": 8},
            "data": {"synthetic": "copy"},
            "zero": {"stage": 0},
        },
        ranks=8,
    )
    found = {"tensor": 0.0, "rows": 0.0, "columns": 0.0, "data": 0.0}
    for call, _, size in predict(config, 8, 3).step:
        if call.layer.startswith("layers."):
            found[call.group] += wire_bytes(call.operation, call.ranks, size) / SIZES[call.dtype]
    found["columns" if columns > 1 else "rows"] += found.pop("tensor")  # a grid with one side
    norms = 2 * 2 * 2 * (columns - 1) / columns * 16_384 // depth
    found["columns"] -= norms
    assert tuple(found.values()) == GOLDEN[rows, columns, depth]
