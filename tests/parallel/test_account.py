"""The account of communication: each operation's bytes, groups by their axes, and torch left as it was."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup

from megatron.parallel.layers.collectives import enter, leave
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from megatron.parallel.messages.account import METHODS, Recorder, group_name, phase
from megatron.parallel.messages.traffic import Call, Tally, wire_bytes
from tests.workers import run


def every_operation() -> None:
    """By the names of torch.distributed, with 8 floats on each of two ranks."""
    rank, eight, sixteen = dist.get_rank(), torch.ones(8), torch.ones(16)
    dist.all_reduce(eight)
    dist.all_gather_into_tensor(sixteen, eight)
    dist.all_gather([torch.empty(8), torch.empty(8)], eight)
    dist.reduce_scatter_tensor(eight, sixteen)
    dist.all_to_all_single(torch.empty(8), eight)
    dist.broadcast(eight.bfloat16(), 0)
    dist.reduce(eight, 0)
    dist.gather(eight, [torch.empty(8), torch.empty(8)] if rank == 0 else None)
    dist.scatter(torch.empty(8), [eight, eight] if rank == 0 else None)
    (dist.send if rank == 0 else dist.recv)(torch.ones(3, dtype=torch.int64), 1 - rank)
    dist.all_reduce(eight, async_op=True).wait()
    dist.barrier()


def operations(rank: int) -> dict[tuple, tuple[int, int]]:
    """(operation, type) -> messages, bytes: nccl-tests' S."""
    return {
        ("all_gather", "fp32"): (2, 128),
        ("all_reduce", "fp32"): (2, 64),
        ("all_to_all", "fp32"): (1, 32),
        ("barrier", ""): (1, 0),
        ("broadcast", "bf16"): (1, 16),
        ("gather", "fp32"): (1, 32),
        ("recv" if rank else "send", "int64"): (1, 24),
        ("reduce", "fp32"): (1, 32),
        ("reduce_scatter", "fp32"): (1, 64),
        ("scatter", "fp32"): (1, 32),
    }


class Region(torch.nn.Module):
    """A tensor region: its forward pass sums once, its backward pass once."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return leave(enter(x, self.mesh) * 2.0, self.mesh)


def two_ranks() -> list:
    plain = {name: vars(ProcessGroup).get(name) for name in METHODS}
    mesh = Mesh.build(Layout(tensor=2), None)
    recorder = Recorder(mesh)
    recorder.install()
    every_operation()
    found = [recorder.tally.take()]
    region, x = Region(mesh), torch.ones(1, 4, 8, requires_grad=True)
    recorder.label(region, "layers.0")
    with phase("forward"):
        y = region(x).sum()
    with phase("backward"):
        y.backward()
    found.append(recorder.tally.take())
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    dist.all_reduce(torch.ones(1), group=alone)
    found.append(recorder.tally.take())
    with pytest.raises(RuntimeError, match="installed already"):
        Recorder(mesh).install()
    recorder.remove()
    dist.all_reduce(torch.ones(1))
    found.append(recorder.tally.take())
    assert plain == {name: vars(ProcessGroup).get(name) for name in METHODS}
    assert not region._forward_hooks and not region._forward_pre_hooks
    return [each.rows() for each in found]


def test_every_operation_of_two_ranks():
    for rank, found in enumerate(run(2, two_ranks)):
        all_, region, alone, after = (Tally.of_rows(rows) for rows in found)
        assert all_.by("operation", "dtype") == operations(rank)
        assert {call.group for call, *_ in all_} == {"tensor"} and {call.ranks for call, *_ in all_} == {2}
        assert list(region) == [
            (Call("backward", "layers.0", "tensor", 2, "all_reduce", "fp32"), 1, 128),
            (Call("forward", "layers.0", "tensor", 2, "all_reduce", "fp32"), 1, 128),
        ]
        assert not len(alone) and not len(after)


def test_every_method_of_a_group_that_moves_data_is_known():
    """A torch with a new one would have calls that are not counted."""
    others = {
        "size", "rank", "name", "boxed", "unbox", "abort", "shutdown", "set_timeout", "split_group", "group_name",
        "group_desc", "bound_device_id", "get_group_store", "merge_remote_group", "monitored_barrier", "BackendType",
        "use_pg_for_symm_mem_rendezvous", "backend_id",
    }  # fmt: skip
    names = {name for name in dir(ProcessGroup) if not name.startswith("_") and not name.isupper()}
    assert names - set(METHODS) <= others, sorted(names - set(METHODS) - others)


def test_groups_are_named_by_their_axes():
    layout = Layout(tensor=2, data=4, pipeline=2, expert=2)
    at = layout.coordinates(0)
    axes = {name: layout.groups(name)[0] for name in ("tensor", "data", "pipeline")}
    for name, ranks in axes.items():
        assert group_name(ranks, layout, at) == name
    assert group_name(range(16), layout, at) == "world"
    assert group_name([0, 1, 8, 9], layout, at) == "tensor+pipeline"
    assert group_name([0, 2], layout, at) == "expert" and group_name([0, 4], layout, at) == "expert_data"


def test_a_damaged_row_is_refused():
    good = ["forward", "head", "tensor", 2, "all_reduce", "fp32", 1, 4]
    assert Tally.of_rows([good]).rows() == [good]
    for place, value in ((0, 1), (3, "2"), (6, -1), (7, 1.5), (7, True)):
        with pytest.raises(ValueError, match="row of an account"):
            Tally.of_rows([[*good[:place], value, *good[place + 1 :]]])
    with pytest.raises(ValueError):
        Tally.of_rows([good[:7]])


def test_bytes_on_the_wire():
    """Factors of nccl-tests' PERFORMANCE.md."""
    assert [wire_bytes(op, 4, 1000) for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")] == [
        1500, 750, 750, 750,
    ]  # fmt: skip
    assert wire_bytes("send", 2, 1000) == wire_bytes("broadcast", 4, 1000) == 1000 and wire_bytes("recv", 2, 9) == 0
