"""Tensor parallel ranks on a grid of rows, columns and depth, against one process."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.checkpoint.format.fragment import FragmentSpec, natural_width, rectangles
from megatron.checkpoint.format.table import tensor_from_dict, tensor_to_dict
from megatron.config import resolve
from megatron.config.kind import kinds_of
from megatron.config.sections.model import NormOptions
from megatron.kinds.moe.layer import MoE
from megatron.model.norm import Norm
from megatron.model.stack import build_model
from megatron.model.stream import Stream
from megatron.parallel.layers.parameters import ParameterFactory, logical_of, shard_index, shard_start
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from megatron.parallel.layout.shard import LogicalTensor, Role, Shard
from megatron.parallel.messages.traffic import SIZES, wire_bytes
from megatron.plan.messages.predict import predict
from megatron.testing import check_layouts
from megatron.testing.checks import noise, part_of
from tests.checkpoint.brute import local_shard
from tests.float64 import EXACT
from tests.model.parity import named, relative
from tests.paths import ROOT
from tests.selection import toured
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
    "training": {"steps": 1, "sequence_length": 12, "micro_batch_size": 2, "global_batch_size": 4},
    "precision": {"compute": "fp32"},
    "zero": {"stage": 0},
}


# Recurrences that go with columns, where something is whole over rows or columns. That is one group of B and C, fewer
# heads of keys than rows, a head of Mamba on two rows, matrices of low rank, norms inside.
MIXERS: dict[str, Any] = {
    **LLAMA,
    "model": {
        **LLAMA["model"],
        "layers": "mamba2/mlp mamba rwkv7/rwkv7_ffn rwkv7 gated_delta gated_delta@low lightning cca",
        "mamba2": {"head_dim": 4, "state_size": 4, "chunk": 5, "bias": True},
        "mamba": {"state_size": 4, "inner_norms": True, "chunk": 5, "bias": True},
        "rwkv7": {
            "head_dim": 4,
            "chunk": 5,
            "init": "model",
            **dict.fromkeys(("decay_rank", "rate_rank", "value_rank", "gate_rank"), 3),
        },
        "rwkv7_ffn": {"init": "model", "hidden_size": 24},
        "gated_delta": {"heads": 4, "key_heads": 1, "key_dim": 4, "value_dim": 4, "chunk": 5, "norm_epsilon": 0.01},
        "variants": {"low": {"decay": "channel", "rank": 3, "householders": 2, "gate": "sigmoid"}},
        "lightning": {"heads": 4, "chunk": 5},
        "cca": {"heads": 4, "kv_heads": 2, "qkv_bias": True, "output_bias": True},
    },
    "data": {"reset_attention_at_eod": True},
}

RWKV: dict[str, Any] = {
    **LLAMA,
    "model": {
        **LLAMA["model"],
        "layers": "rwkv4/rwkv4_ffn rwkv5/rwkv5_ffn rwkv6/rwkv6_ffn",
        "rwkv4": {"init": "model", "chunk": 5},
        "rwkv5": {"init": "model", "head_dim": 4, "chunk": 5},
        "rwkv6": {"init": "model", "head_dim": 4, "chunk": 5, "mix_rank": 2, "decay_rank": 3},
        **{f"rwkv{number}_ffn": {"init": "model", "hidden_size": 24} for number in (4, 5, 6)},
    },
    "data": {"reset_attention_at_eod": True},
}

MOE: dict[str, Any] = {
    **LLAMA,
    "model": {
        **LLAMA["model"],
        "layers": "mla/moe attention/moe@states mla@plain/moe@latent attention/moe@own",
        "mla": {"heads": 4, "query_rank": 12, "kv_rank": 8, "nope_dim": 6, "rope_dim": 4, "value_dim": 8, "bias": True},
        "moe": {
            "experts": 4,
            "hidden_size": 16,
            "bias": True,
            "shared_size": 12,
            "shared_gate": True,
            "router": {"score": "sigmoid", "normalize": True, "bias": True},
            "losses": {"balance": 0.0},
        },
        "variants": {
            "states": {"router": {"network": "mlp", "width": 12, "average": False}, "gated": False},
            "latent": {"latent_size": 16, "bias": False, "shared_size": 0, "shared_gate": False},
            "plain": {"query_rank": None, "position": "none"},
            "own": {"own_norms": True, "router": {"expert_scale": True}},
        },
    },
}


def grid(rows: int, columns: int, depth: int = 1, **others: Any) -> dict[str, Any]:
    parallel = {"tensor": rows, "columns": columns, "depth": depth, **others}
    return {"parallel": parallel, "ranks": rows * columns * depth * others.get("pipeline", 1)}


def test_losses_and_gradients_are_those_of_one_process():
    check_layouts(LLAMA, [grid(2, 2), grid(1, 2, 2), grid(1, 4), {**grid(1, 2, pipeline=2), "zero": {"stage": 1}}])


@pytest.mark.parametrize("values", toured([MIXERS, RWKV], "layouts"), ids=["mixers", "rwkv"])
def test_recurrences_are_those_of_one_process(values: dict[str, Any]):
    check_layouts(values, [grid(2, 2), {**grid(1, 4), "zero": {"stage": 1}}, grid(1, 2, pipeline=2)])


def test_kinds_with_columns_are_those_of_the_page():
    """A kind that is made of another one has to say so itself."""
    page = (ROOT / "docs/layouts.md").read_text(encoding="utf-8")
    table = page.partition("| layers | what columns do with them |")[2].partition("| all others |")[0]
    listed = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", "".join(line.split("|")[1:2]))}
    assert listed == {name for name, kind in kinds_of().items() if kind.columns}


def decoded_on_a_rank(values: dict[str, Any], layout: Layout) -> float:
    """The relative error of the logits of pieces of 5, 1 and 3 tokens, against the whole text in one process."""
    config, found = resolve(values), []
    alone, cut = (build_model(config, mesh, dtype=torch.float64) for mesh in (None, Mesh.build(layout)))
    for model in (alone, cut):
        for each in dict.fromkeys(model.parameters()):
            mine = part_of(noise(logical_of(each)), logical_of(each), *shard_index(each))
            each.data += torch.from_numpy(mine).view_as(each)
    tokens = torch.arange(18).view(2, 9) * 7 % 61
    with torch.no_grad():
        state, wanted = cut.new_state(), alone.logits(tokens)
        for begin, end in ((0, 5), (5, 6), (6, 9)):
            found.append(cut.decode(tokens[:, begin:end], state, begin))
    return relative(torch.cat(found, 1), wanted)


@pytest.mark.parametrize("values", toured([MIXERS, RWKV, MOE], "layouts"), ids=["mixers", "rwkv", "moe"])
def test_decoding_on_a_grid(values: dict[str, Any]):
    """States and compressed vectors of earlier tokens, and matrices whose inputs columns share."""
    one_document = {name: section for name, section in values.items() if name != "data"}
    assert max(run(4, decoded_on_a_rank, one_document, Layout(tensor=4, columns=2))) < EXACT


@pytest.mark.parametrize("values", toured([MIXERS, RWKV, MOE], "layouts"), ids=["mixers", "rwkv", "moe"])
def test_initial_values_do_not_depend_on_the_grid(values: dict[str, Any]):
    """Every rank's part of every tensor, runs of rows and of experts too, bit for bit."""
    config = resolve(values)
    whole = {name: each.detach().numpy() for name, each in named(build_model(config)).items()}
    for layout in (Layout(tensor=4, columns=2, data=2, depth=2, expert=2), Layout(tensor=4, columns=4)):
        for rank in range(layout.world_size):
            for name, each in named(build_model(config, Mesh.describe(layout, rank))).items():
                mine = part_of(whole[name], logical_of(each), *shard_index(each))
                first = shard_start(each)
                assert np.array_equal(mine[first : first + each.numel()], each.detach().numpy().reshape(-1)), name


@pytest.mark.parametrize("rows, columns", [(2, 2), (4, 2), (2, 4), (1, 8)])
def test_numbers_on_the_wire_of_recurrences(rows: int, columns: int):
    """By hand, per token of a rank. A mixer sums what its matrices make of the stream over columns, and in the backward
    pass the inputs of its output matrix. Rows sum the stream twice. Norms are as in dense stacks."""
    H, heads, state, rank, width, tokens = 512, 16, 64, 32, 2048, 4 * 256
    config = resolve(
        {
            "model": {
                "layers": "mamba2 rwkv7/rwkv7_ffn",
                "hidden_size": H,
                "vocab_size": 64,
                "norm": {"type": "rmsnorm"},
                "mamba2": {"head_dim": 2 * H // heads, "state_size": state, "groups": 4},
                "rwkv7": dict.fromkeys(("decay_rank", "rate_rank", "value_rank", "gate_rank"), rank),
                "rwkv7_ffn": {"hidden_size": width},
            },
            "parallel": {"tensor": {"rows": rows, "columns": columns}},
            "training": {"steps": 1, "sequence_length": 256, "micro_batch_size": 4, "global_batch_size": 4},
            "data": {"synthetic": "copy"},
            "zero": {"stage": 0},
        },
        ranks=rows * columns,
    )
    mamba2 = (4 * H + 2 * 4 * state + heads) / rows + 2 * H / rows
    rwkv7 = 3 * H / rows + 3 * rank + H / rows  # the first layer has no blend
    channel_mix = 2 * width / rows
    ring = [2 * (ranks - 1) / ranks for ranks in (rows, columns)]
    shared = (6 + 3 * rank + 1) * H // columns  # gradients of the mixes and of the low ranks' first matrices
    wanted = ring[0] * (3 * 2 * tokens * H / columns + shared), ring[1] * tokens * (mamba2 + rwkv7 + channel_mix + 6)
    found = {"rows": 0.0, "columns": 0.0, "tensor": 0.0}
    for call, _, size in predict(config, rows * columns, 0).step:
        if call.layer.startswith("layers."):
            found[call.group] += wire_bytes(call.operation, call.ranks, size) / SIZES[call.dtype]
    assert (found["rows"], found["columns"] + found["tensor"]) == wanted


@pytest.mark.layouts
def test_experts_of_every_form():
    """Routers with and without states, biases, a shared expert with a gate, latent experts, norms of their own. And
    latent attention with and without compressed queries."""
    check_layouts(MOE, [grid(2, 2), grid(1, 2, 2), grid(1, 2, 2, expert=2), grid(1, 4)])


def test_noise_of_routers_is_numbered_by_channels_of_the_whole_stream():
    values = {**LLAMA["model"], "layers": "moe", "moe": {"hidden_size": 16, "router": {"jitter": 0.4}}}
    config, draw, layout = (
        resolve({**LLAMA, "model": values}),
        torch.Generator().manual_seed(3),
        Layout(tensor=4, columns=2),
    )
    x = torch.randn((2, 12, 16), generator=draw)
    stream, noisy = Stream(x, samples=torch.tensor([5, 2**33 + 1])), []
    for mesh in (Mesh.single(), *(Mesh.describe(layout, rank) for rank in range(4))):
        (moe,) = (each for each in build_model(config, mesh).train().modules() if isinstance(each, MoE))
        noisy.append(moe._jittered(x.chunk(mesh.columns.size, -1)[mesh.columns.rank], stream))
    assert not torch.equal(noisy[0], x)
    for rank, each in enumerate(noisy[1:]):
        assert torch.equal(each, noisy[0].chunk(2, -1)[rank % 2])


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


@pytest.mark.parametrize(
    "shape, cut",
    [
        ((12, 6), Shard(0, (8, 4), 2, across=1, columns=3)),
        ((3, 12, 6), Shard(1, (8, 4), 2, across=2, columns=3)),  # experts that read the stream
        ((3, 6, 12), Shard(2, None, 2, across=1, columns=3)),  # and that write it
    ],
)
def test_a_cut_in_two_directions_covers_the_tensor(shape: tuple[int, ...], cut: Shard):
    """Every element once, by spans and by the rectangles that checkpoints read, in whole and in pieces."""
    tensor = LogicalTensor("a", shape, Role.HIDDEN, cut)
    size = math.prod(shape)
    values, seen, each_rank = np.arange(size).reshape(shape), np.zeros(size, int), size // 6
    for rank in range(6):
        mine = local_shard(values, tensor, rank, 6)
        assert (part_of(values, tensor, rank, 6) == mine).all() and mine.size == each_rank
        for first in range(0, each_rank, 5):
            spec = FragmentSpec.whole(tensor, "weight", rank, 6).part(first, min(5, each_rank - first))
            for each in rectangles(spec):
                for row in range(each.rows):
                    begin = each.local + row * each.stride
                    matrix = values.reshape(-1, natural_width(tensor))
                    there = matrix[each.row + row, each.column : each.column + each.columns]
                    assert (mine[first + begin : first + begin + each.columns] == there).all()
                    seen[there] += 1
    assert (seen == 1).all()
    assert (part_of(values, tensor, 0, 1) == values.reshape(-1)).all()  # what an optimizer's owner of the whole has
    assert sum(each.rows * each.columns for each in rectangles(FragmentSpec.whole(tensor, "row"))) == size
    assert tensor_from_dict(json.loads(json.dumps(tensor_to_dict(tensor)))) == tensor
    for wrong in ({"columns": 4}, {"across": len(shape)}, {"across": None}, {"columns": 0}):
        values_of = tensor_to_dict(tensor)
        with pytest.raises(ValueError, match="is cut by"):
            tensor_from_dict({**values_of, "shard": {**values_of["shard"], **wrong}})


@pytest.mark.parametrize("rows, columns", [(1, 2), (2, 2), (2, 4), (1, 8)])
def test_numbers_on_the_wire_are_those_of_the_formulas(rows: int, columns: int):
    """Of a block of latent attention and experts, per token. They are the formulas of docs/layouts.md for the columns,
    and two sums of the stream for each layer on the rows. tests/engine/test_traffic.py counts such messages."""
    H, n, N, P, V, R, Q, E, k, f, s = 64, 4, 6, 4, 8, 24, 16, 8, 3, 32, 40
    mla = {"heads": n, "nope_dim": N, "rope_dim": P, "value_dim": V, "kv_rank": R, "query_rank": Q}
    moe = {"experts": E, "top_k": k, "hidden_size": f, "shared_size": s, "losses": {"balance": 0.0}}
    own = {"layers": "mla/moe", "hidden_size": H, "vocab_size": 64, "norm": {"type": "rmsnorm"}, "mla": mla, "moe": moe}
    parallel = {"tensor": rows, "columns": columns}
    training = {"steps": 1, "sequence_length": 32, "micro_batch_size": 2, "global_batch_size": 2}
    values = {"model": own, "parallel": parallel, "training": training, "data": {"synthetic": "copy"}}
    config, found = resolve(values, ranks=rows * columns), {"rows": 0.0, "columns": 0.0}
    tokens = training["micro_batch_size"] * training["sequence_length"]
    for call, _, size in predict(config, rows * columns, 0).step:
        if call.layer.startswith("layers."):
            group = "columns" if call.group == "tensor" else call.group  # one row
            found[group] += wire_bytes(call.operation, call.ranks, size) / SIZES[call.dtype] / tokens
    sums, norms = 3 * (k * f + s) / rows + E + k + n * (2 * N + P + 2 * V) / rows + R + P + Q, 2 * 2
    share = (columns - 1) / columns
    assert found["columns"] == pytest.approx(2 * share * (sums + norms) + share * (R + Q))
    replicated = [H * (R + P) // columns, H * Q // columns, R, Q, H * E // columns]  # gradients of what all rows have
    of_gradients = 2 * (rows - 1) / rows * sum(replicated) / tokens
    assert found["rows"] == pytest.approx(4 * 2 * (rows - 1) / rows * H / columns + of_gradients)
