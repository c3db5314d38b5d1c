"""Matrices whose rows the ranks of a sequence share, against one rank that has them whole, in float64.

Training runs on such layouts are in tests/layouts.yml, and tests/engine/test_traffic.py counts their messages.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config import resolve
from megatron.model.stack import ModelPlan
from megatron.parallel.layers.folded import embedding_of_rows, linear_of_rows
from megatron.parallel.layers.linear import ColumnLinear
from megatron.parallel.layers.parameters import ParameterFactory, shares_rows
from megatron.parallel.layout.initial import Init
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from megatron.parallel.messages.traffic import Tally, wire_bytes
from megatron.plan.messages.predict import predict
from megatron.rehearsal.command import in_own_process
from tests.float64 import EXACT
from tests.model.parity import relative
from tests.workers import run

TOKENS, INPUTS, OUTPUTS = 10, 6, 12
LLAMA = {
    "model": {
        "layers": "attention/mlp x2",
        "hidden_size": 32,
        "vocab_size": 96,
        "norm": {"type": "rmsnorm"},
        "attention": {"heads": 4, "kv_heads": 2},
        "mlp": {"hidden_size": 48, "gated": True, "activation": "silu"},
    },
    "training": {"steps": 2, "sequence_length": 32, "micro_batch_size": 3, "global_batch_size": 3},
    "data": {"synthetic": "copy"},
    "optimizer": {"type": "sgd", "lr": 0.1},
}


def drawn(ranks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs of all ranks, the matrix, its bias, and the gradient of the result."""
    draw = torch.Generator().manual_seed(3)
    shapes = ((ranks, TOKENS, INPUTS), (OUTPUTS, INPUTS), (OUTPUTS,), (ranks, TOKENS, OUTPUTS))
    x, weight, bias, of_y = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    return x, weight, bias, of_y


def leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def linear_on_a_rank(ranks: int, dtype: torch.dtype) -> list[Tensor]:
    """The result, and gradients of input, own rows and bias. The last two of two uses of the matrix."""
    mesh = Mesh.build(Layout(context=ranks, expert=ranks, shares_rows=True))
    x, weight, bias, of_y = drawn(ranks)
    at, rows = mesh.context.rank, OUTPUTS // ranks
    mine, own, bias = leaf(x[at].to(dtype)), leaf(weight[at * rows : (at + 1) * rows].to(dtype)), leaf(bias.to(dtype))
    y = linear_of_rows(mine, own, bias, mesh.context)
    again = linear_of_rows(mine.view(2, -1, INPUTS), own, None, mesh.context)
    torch.autograd.backward([y, again.view_as(y)], [of_y[at].to(dtype)] * 2)
    return [y.detach(), mine.grad, own.grad, bias.grad]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_product_is_that_of_one_rank(ranks: int):
    x, weight, bias, of_y = drawn(ranks)
    x, weight, bias = leaf(x), leaf(weight), leaf(bias)
    y = F.linear(x, weight, bias)
    torch.autograd.backward([y, F.linear(x, weight)], [of_y] * 2)
    found = run(ranks, linear_on_a_rank, ranks, torch.float64)
    for rank, (own_y, dx, _, _) in enumerate(found):
        assert relative(own_y, y[rank]) < EXACT and relative(dx, x.grad[rank]) < EXACT
    assert relative(torch.cat([each[2] for each in found]), weight.grad) < EXACT
    assert relative(sum(each[3] for each in found), bias.grad) < EXACT  # what data parallel ranks sum, too


def test_gradients_of_16_bits_are_summed_in_fp32():
    """So that their error does not grow with the ranks: the product of each rank is rounded, and the sum of all."""
    x, weight, _, of_y = drawn(4)
    products = [2 * of_y[rank].bfloat16().T @ x[rank].bfloat16() for rank in range(4)]
    expected = sum(each.float() for each in products).bfloat16()
    found = torch.cat([each[2] for each in run(4, linear_on_a_rank, 4, torch.bfloat16)])
    assert found.dtype == torch.bfloat16
    # two uses of the matrix are two sums, each rounded
    assert relative(found, expected) < 2**-7


def embedding_on_a_rank(ranks: int) -> list[Tensor]:
    mesh = Mesh.build(Layout(context=ranks, expert=ranks, shares_rows=True))
    _, weight, _, _ = drawn(ranks)
    at, rows = mesh.context.rank, OUTPUTS // ranks
    own = leaf(weight[at * rows : (at + 1) * rows])
    x = embedding_of_rows(tokens(ranks)[at], own, mesh.context)
    x.backward(torch.arange(x.numel(), dtype=x.dtype).view_as(x) * (at + 1))
    return [x.detach(), own.grad]


def tokens(ranks: int) -> Tensor:
    """Some rows several times, some never."""
    draw = torch.Generator().manual_seed(5)
    return torch.randint(1, OUTPUTS - 1, (ranks, 2, TOKENS), generator=draw)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_table_is_that_of_one_rank(ranks: int):
    weight = leaf(drawn(ranks)[1])
    x = F.embedding(tokens(ranks), weight)
    count = x[0].numel()
    of_x = [torch.arange(count, dtype=x.dtype).view_as(x[0]) * (rank + 1) for rank in range(ranks)]
    x.backward(torch.stack(of_x))
    found = run(ranks, embedding_on_a_rank, ranks)
    assert torch.equal(torch.stack([each[0] for each in found]), x)
    assert relative(torch.cat([each[1] for each in found]), weight.grad) < EXACT


def test_rows_that_ranks_do_not_divide_stay_whole():
    make = ParameterFactory(Mesh.describe(Layout(context=4, expert=4, shares_rows=True), 2), device="meta")
    init = Init("normal", 0.02)
    assert ColumnLinear(make.scope("a"), 6, (8,), init=init).weight.shape == (2, 6)
    whole = ColumnLinear(make.scope("b"), 6, (10,), init=init)
    assert whole.weight.shape == (10, 6) and not shares_rows(whole.weight)


def test_a_rank_stores_its_part_of_all_matrices():
    values = {**LLAMA, "parallel": {"folded": 4}}
    mesh = Mesh.describe(Layout.of(resolve(values, ranks=4), 4), 1)
    plan = ModelPlan(resolve(values, ranks=4), mesh, "meta", values=False)
    for module in (plan.embedding(), plan.block(0), plan.head()):
        for parameter in module.parameters():
            assert shares_rows(parameter) == (parameter.ndim == 2)
            assert (
                not shares_rows(parameter) or parameter.numel() * 4 == parameter.logical.shape[0] * parameter.shape[1]
            )


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bytes_of_the_paper(ranks: int):
    """Of a layer's forward pass on each rank of D: (D - 1) / D of its weights, and of the keys and values of the whole
    sequence (arXiv:2604.26294). Written out with the model's sizes, not with what the layers say."""
    config = resolve({**LLAMA, "parallel": {"folded": ranks, "context_method": "gather"}}, ranks=ranks)
    H, kv_heads, D, width, B, S = 32, 2, 8, 48, 3, 32
    weights = 2 * H * H + 2 * H * kv_heads * D + 3 * H * width
    keys_and_values = 2 * B * S * kv_heads * D
    share = (ranks - 1) / ranks * 4  # bytes of a number in fp32
    for rank in range(ranks):
        sent = {"forward": 0.0, "backward": 0.0}
        for call, _, size in predict(config, ranks, rank).step:
            if call.layer.startswith("layers.1") and call.group == "context":
                sent[call.phase] += wire_bytes(call.operation, call.ranks, size)
        assert sent["forward"] == pytest.approx(share * (weights + keys_and_values), rel=1e-12)
        # the weights once more and their gradients, and the ones of keys and values
        assert sent["backward"] == pytest.approx(share * (2 * weights + keys_and_values), rel=1e-12)


def test_chunks_of_a_sequence_gather_the_head_once():
    """Counted by a rehearsed rank of the real program."""
    training = {**LLAMA["training"], "sequence_chunks": 4, "micro_batch_size": 1, "global_batch_size": 1}
    config = resolve({**LLAMA, "training": training, "parallel": {"folded": 2}, "zero": {"stage": 0}}, ranks=2)
    found = {}
    for call, messages, size in Tally.of_rows(in_own_process(config, 2, 1).messages):
        if call.group == "context" and call.phase != "update" and call.operation in ("all_gather", "reduce_scatter"):
            before = found.get(call.operation, (0, 0))
            found[call.operation] = before[0] + messages, before[1] + size
    once = 1, 4 * 96 * 32
    assert found == {"all_gather": once, "reduce_scatter": once}
