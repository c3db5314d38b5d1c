"""Sums and gathers in memory of the host: the same bits on all ranks, nothing left, and no silent wait."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup

from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from megatron.parallel.messages.account import Recorder
from megatron.parallel.transport import host_memory
from megatron.parallel.transport.shared_sums import METHODS, SharedSums, averages
from tests.workers import run

TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 63, 1000, 12_345)  # the last in several chunks
CHUNK = 4096


def term(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * size + rank)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def in_order(terms: list[torch.Tensor], ranks: int = 1) -> torch.Tensor:
    """The sum in the order of ranks, of 16-bit numbers in fp32 and rounded once, over `ranks`."""
    dtype = terms[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    total = terms[0].to(wide)
    for each in terms[1:]:
        total = total + each.to(wide)
    if len(terms) == 2:
        total = total.to(dtype)  # one addition rounds already
    return (total * (1 / ranks)).to(dtype)


def operations(size: int, dtype: torch.dtype, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    """A sum, a part of a sum of n times the numbers, and a gather, twice: of another tensor and in place."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    mine = term(rank, size, dtype)
    summed, part = mine.clone(), torch.empty(size, dtype=dtype)
    gathered, in_place = torch.empty(ranks * size, dtype=dtype), torch.empty(ranks * size, dtype=dtype)
    own = in_place.chunk(ranks)[rank]
    own.copy_(mine)
    dist.all_reduce(summed, group=group)
    dist.reduce_scatter_tensor(part, term(rank, ranks * size, dtype), group=group)
    dist.all_gather_into_tensor(gathered, mine, group=group)
    dist.all_gather_into_tensor(in_place, own, group=group)
    return [summed, part, gathered, in_place]


def check(found: list[torch.Tensor], size: int, dtype: torch.dtype, group: dist.ProcessGroup | None = None) -> None:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    terms = [term(each, size, dtype) for each in range(ranks)]
    large = in_order([term(each, ranks * size, dtype) for each in range(ranks)])
    wanted = [in_order(terms), large[rank * size : (rank + 1) * size], torch.cat(terms), torch.cat(terms)]
    for place, (one, other) in enumerate(zip(found, wanted)):
        assert torch.equal(one, other), (place, size, dtype, ranks)


def all_forms(ranks: int) -> dict:
    mesh, told = Mesh.build(Layout(data=ranks), None), {}
    ends, shown = len(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
    before = {name: vars(ProcessGroup).get(name) for name in METHODS}
    lines: list[str] = []
    recorder = Recorder(mesh)
    recorder.install()  # before: what is counted does not depend on the way
    operations(1000, torch.float32), dist.all_reduce(torch.ones(5000))
    told["gloo"] = recorder.tally.take()
    with SharedSums(lines.append, least=1, chunk=CHUNK).installed():
        operations(1000, torch.float32), dist.all_reduce(torch.ones(5000))
        told["shared"] = recorder.tally.take()
        for dtype in TYPES:
            for size in SIZES:
                check(operations(size, dtype), size, dtype)
        pairs = [dist.new_group([at, at + 1], use_local_synchronization=True) for at in range(0, ranks - 1, 2)
                 if mesh.rank in (at, at + 1)]  # fmt: skip
        for _ in range(5):  # several groups, which take turns. One of them with other sizes than its neighbour
            for pair in pairs:
                size = 700 + 100 * (mesh.rank // 2)
                check(operations(size, torch.float32, pair), size, torch.float32, pair)
            check(operations(1234, torch.float64), 1234, torch.float64)
        told["new in folders"] = set(os.listdir("/dev/shm")) - shown
        mean, strided = term(mesh.rank, 999, torch.float32), torch.ones(2000)[::2]
        assert averages(dist.group.WORLD, mean) and not averages(dist.group.WORLD, strided)
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        assert torch.equal(mean, in_order([term(each, 999, torch.float32) for each in range(ranks)], ranks))
        several = [term(mesh.rank, size, torch.float32) for size in (5000, 3)] + [torch.empty(0)]
        recorder.tally.take(), dist.all_reduce_coalesced(several)
        assert [count for *_, count in recorder.tally.take().rows()] == [4 * 5003]
        for each, size in zip(several, (5000, 3)):
            assert torch.equal(each, in_order([term(rank, size, torch.float32) for rank in range(ranks)]))
        largest, whole, later = term(mesh.rank, 99, torch.float32), torch.full((9,), mesh.rank), torch.ones(500)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)  # what stays gloo's
        dist.all_reduce(whole)
        dist.all_reduce(later, async_op=True).wait()
        assert largest[0] == max(term(each, 99, torch.float32)[0] for each in range(ranks))
        assert whole[0] == ranks * (ranks - 1) // 2 and later[0] == ranks
        told["used"] = len(os.listdir("/proc/self/fd")) > ends
    recorder.remove()
    assert not averages(dist.group.WORLD, torch.ones(10**6))
    assert before == {name: vars(ProcessGroup).get(name) for name in METHODS}
    for pair in pairs:
        dist.destroy_process_group(pair)
    told["lines"] = lines
    return told


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_and_gathers(ranks: int):
    for told in run(ranks, all_forms, ranks):
        assert told["gloo"] == told["shared"] and len(told["gloo"]) > 2
        assert not told["new in folders"] and told["used"] and told["lines"] == []


def without_memory(where: str) -> tuple[list[str], int]:
    """One rank of three has no room, or is on another host."""
    lines: list[str] = []
    fallocate, sockets = os.posix_fallocate, host_memory.socket
    if dist.get_rank() == 1 and where == "full":

        def full(*_: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        os.posix_fallocate = full
    if dist.get_rank() == 1 and where == "elsewhere":
        host_memory.socket = SimpleNamespace(gethostname=lambda: "another")
    ends = len(os.listdir("/proc/self/fd"))
    try:
        with SharedSums(lines.append, least=1).installed():
            check(operations(999, torch.float64), 999, torch.float64) if where == "here" else operations(9, TYPES[0])
            x = torch.full((3,), 1.0 + dist.get_rank())
            dist.all_reduce(x)
            assert x.tolist() == [6.0] * 3
            assert averages(dist.group.WORLD, x) == (where == "here")
            used = len(os.listdir("/proc/self/fd")) - ends
    finally:
        os.posix_fallocate, host_memory.socket = fallocate, sockets
    return lines, used


@pytest.mark.parametrize("where", ["full", "elsewhere", "here"])
def test_without_memory_gloo_sums(where: str):
    told = run(3, without_memory, where)
    for rank, (lines, used) in enumerate(told):
        assert (used > 0) == (where == "here")
        if where != "full":
            assert lines == []
            continue
        reason = "No space left on device" if rank == 1 else "another rank could not"
        assert len(lines) == 1 and "3 ranks of this host share no memory" in lines[0] and reason in lines[0]


def late(seconds: float) -> str:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=60))
    with SharedSums(print, least=1).installed():
        dist.all_reduce(torch.ones(100), group=group)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)  # as the trainer limits groups
        if dist.get_rank() == 1:
            dist.barrier()
            return ""
        errors = []
        for _ in range(2):  # and again at once: no rank knows the others' places any more
            with pytest.raises(RuntimeError) as error:
                dist.all_reduce(torch.ones(100), group=group)
            errors.append(str(error.value))
        dist.barrier()
        assert errors[0] == errors[1]
        return errors[0]


def test_who_does_not_come_is_waited_for_no_longer_than_said():
    assert "Timed out waiting 500ms" in run(2, late, 0.5)[0]


def different() -> str:
    with SharedSums(print, least=1).installed():
        dist.all_reduce(torch.ones(100))
        with pytest.raises(RuntimeError) as error:
            dist.all_reduce(torch.ones(100 + dist.get_rank()))
    return str(error.value)


def test_other_operations_are_no_sum():
    assert all("different operations" in each for each in run(2, different))


RANK = """
import os, signal, sys, torch, torch.distributed as dist
from megatron.parallel.transport.shared_sums import SharedSums
rank = int(sys.argv[1])
dist.init_process_group("gloo", rank=rank, world_size=3, init_method="file://" + sys.argv[2])
with SharedSums(print, least=1, chunk=4096).installed():
    dist.all_reduce(torch.ones(10**5))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(10**5))
"""


def _named_memory() -> set[str]:
    """Of this machine, but for the locks of multiprocessing: other tests make those meanwhile, and these ranks none."""
    return {each for each in os.listdir("/dev/shm") if not each.startswith("sem.mp-")}


def test_a_killed_rank_ends_the_others(tmp_path: Path):
    shown = _named_memory()
    root = Path(__file__).parents[2]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")],
            cwd=root, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    said = [each.communicate(timeout=120)[1] for each in ranks]
    assert ranks[1].returncode == -signal.SIGKILL
    for rank in (0, 2):
        assert ranks[rank].returncode == 1 and "RuntimeError: Connection closed by peer" in said[rank], said[rank]
    assert not _named_memory() - shown
