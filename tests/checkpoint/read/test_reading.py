"""Fit, types, stand-ins and memory."""

from __future__ import annotations

import ctypes
import json
import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import (
    CheckpointError,
    Fragment,
    FragmentSpec,
    GroupCommunicator,
    Meta,
    open_checkpoint,
    save,
    write_tensors,
)
from megatron.checkpoint.format import durable
from megatron.checkpoint.format.errors import brief, by_layer
from megatron.checkpoint.format.index import INDEX_NAME
from megatron.checkpoint.format.index_file import HashTree
from megatron.checkpoint.read import read_plan
from megatron.checkpoint.read.logical import streamed
from megatron.checkpoint.reshape import reshape
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.shard import LogicalTensor, Role, Shard
from tests.checkpoint.model import Model, Together, fragments, meta
from tests.checkpoint.processes import ended
from tests.workers import run

MATRIX = LogicalTensor("matrix", (4, 6), Role.HIDDEN, Shard(1))


def store(directory: Path, **states: torch.Tensor) -> Path:
    found = [Fragment(MATRIX, state, 0, 1, 0, data.reshape(-1)) for state, data in states.items()]
    return save(directory, 1, found, Meta(1))


def target(state: str, dtype: torch.dtype) -> Fragment:
    return Fragment.empty(FragmentSpec.whole(MATRIX, state), dtype)


def test_mismatches_are_listed_all_at_once(tmp_path):
    path = save(tmp_path, 1, fragments(Model(), Layout(), 0), meta(1))
    specs = [fragment.spec for fragment in fragments(Model(), Layout(), 0)]
    embedding = next(spec for spec in specs if spec.tensor.name == "embedding.weight" and spec.state == "weight")
    wanted = [spec for spec in specs if not spec.tensor.name.startswith("layers.2.mlp.down")]
    wanted += [
        FragmentSpec.whole(LogicalTensor("extra.weight", (3,), Role.NORM), "weight"),
        FragmentSpec.whole(replace(embedding.tensor, shape=(38, 12)), "weight"),
        FragmentSpec.whole(embedding.tensor, "momentum_buffer"),
    ]
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(path).check(wanted)
    assert sorted(error.value.problems) == sorted([
        "missing: extra.weight is in the run, but not in the checkpoint",
        "wrong shape: embedding.weight is (38, 12) in the run, (37, 12) in the checkpoint",
        "missing: embedding.weight (momentum_buffer) is in the run. The checkpoint has only "
        "exp_avg, exp_avg_sq, master, weight of it",
        *(
            f"left over: layers.2.mlp.down.weight ({state}) is in the checkpoint, not in the run"
            for state in ("exp_avg", "exp_avg_sq", "master", "weight")
        ),
    ])
    with pytest.raises(CheckpointError, match="extra.weight is in the run, but not in the checkpoint"):
        open_checkpoint(path).read_into([Fragment.empty(wanted[-3], torch.float32)])


def test_ranks_want_together(tmp_path):
    """A block that one rank lacks another may need. A block that no rank needs is left over, and every rank reports
    it."""
    path = save(tmp_path, 1, fragments(Model(), Layout(), 0), meta(1))
    checkpoint, layout = open_checkpoint(path), Layout(pipeline=3)

    def work(member, leave="nothing"):
        specs = [each.spec for each in fragments(Model(), layout, member.rank)]
        return checkpoint.check([spec for spec in specs if not spec.tensor.name.startswith(leave)], communicator=member)

    assert Together(3).run(work) == [None] * 3
    results = Together(3).run(lambda member: work(member, "head"))
    assert len({str(result) for result in results}) == 1
    assert results[0].problems == [
        f"left over: head.weight ({state}) is in the checkpoint, not in the run"
        for state in ("exp_avg", "exp_avg_sq", "master", "weight")
    ]


def test_weights_alone_can_be_taken(tmp_path):
    path = save(tmp_path, 1, fragments(Model(), Layout(), 0), meta(1))
    specs = [each.spec for each in fragments(Model(), Layout(), 0) if each.state == "weight"]
    checkpoint = open_checkpoint(path)
    checkpoint.check(specs, states={"weight", "master"})
    with pytest.raises(CheckpointError, match="exp_avg"):
        checkpoint.check(specs)


def test_types_change_only_when_asked(tmp_path):
    values = torch.randn(4, 6)
    checkpoint = open_checkpoint(store(tmp_path, exp_avg=values, count=torch.arange(24)))
    with pytest.raises(CheckpointError, match=r"exp_avg\) is torch.bfloat16 in the run, torch.float32 in the check"):
        checkpoint.read_into([target("exp_avg", torch.bfloat16)])
    half = target("exp_avg", torch.bfloat16)
    notes = checkpoint.read_into([half], cast={"exp_avg"})
    assert torch.equal(half.data, values.reshape(-1).bfloat16())
    assert notes == ["1 fragments: exp_avg read from exp_avg, converted from torch.float32 to torch.bfloat16"]
    with pytest.raises(CheckpointError, match="wrong type"):
        checkpoint.read_into([target("count", torch.float32)], cast={"count"})


def test_weight_and_master_stand_for_each_other(tmp_path):
    """fp32 run to bf16 run with masters and back: the fp32 values survive, bit for bit."""
    values = torch.randn(24)
    whole = open_checkpoint(store(tmp_path / "fp32", weight=values))
    master, weight = target("master", torch.float32), target("weight", torch.bfloat16)
    notes = whole.read_into([master, weight], cast={"weight"})
    assert torch.equal(master.data, values) and torch.equal(weight.data, values.bfloat16())
    assert any("master read from weight" in note for note in notes)
    mixed = open_checkpoint(store(tmp_path / "bf16", weight=values.bfloat16(), master=values))
    back = target("weight", torch.float32)
    mixed.read_into([back], cast={"weight"})
    assert torch.equal(back.data, values)  # from the master, not from the rounded weight
    same = target("weight", torch.bfloat16)
    assert mixed.read_into([same]) == [] and torch.equal(same.data, values.bfloat16())


def test_bits_that_are_not_numbers_survive(tmp_path):
    """NaN payloads, infinities, negative zero and denormals."""
    bits = torch.tensor([0x7FC12345, 0x7F800000, -0x80000000, 1, -0x7FFFFF, 0x7F800001] * 4, dtype=torch.int32)
    checkpoint = open_checkpoint(store(tmp_path, master=bits.view(torch.float32)))
    found = target("master", torch.float32)
    checkpoint.read_into([found])
    assert torch.equal(found.data.view(torch.int32), bits)


def test_chunks_and_long_runs(tmp_path, monkeypatch):
    """The same values when every buffer is tiny: reads in many chunks, runs one by one and with their gaps."""
    tensor = LogicalTensor("m", (64, 48), Role.HIDDEN, Shard(1, (32, 16), 2))
    values = torch.arange(64 * 48, dtype=torch.float32)
    path = save(tmp_path, 1, [Fragment(tensor, "master", 0, 1, 0, values)], Meta(1))
    for chunk in (4, 100, 400, 100_000):
        for long_run in (1, 40, 1000):
            monkeypatch.setattr(read_plan, "CHUNK", chunk)
            monkeypatch.setattr(read_plan, "LONG_RUN", long_run)
            for rank in range(3):
                spec = FragmentSpec.whole(tensor, "master", rank, 3)
                gate = slice(rank * 16 // 3 * 2, (rank + 1) * 16 // 3 * 2)
                up = slice(32 + rank * 8 // 3 * 2, 32 + (rank + 1) * 8 // 3 * 2)
                grid = values.view(64, 48)
                expected = torch.cat([grid[:, gate], grid[:, up]], dim=1).reshape(-1)
                assert torch.equal(open_checkpoint(path).read(spec).data, expected)
                half = open_checkpoint(path).read(spec, torch.float64)
                assert torch.equal(half.data, expected.double())


class OnItsWay(torch.Tensor):
    """Values of a device that copies late: not before the host waits for them."""

    late: list[tuple[torch.Tensor, torch.Tensor]] = []
    is_cuda, device = True, torch.device("cuda", 0)

    def copy_(self, source, non_blocking):
        assert non_blocking and self.is_contiguous() or isinstance(source, OnItsWay)
        self.late.append((self.as_subclass(torch.Tensor), source.as_subclass(torch.Tensor)))


class Pinned(torch.Tensor):
    def to(self, device, non_blocking):
        assert self.is_contiguous()
        there = torch.zeros(self.shape, dtype=self.dtype).as_subclass(OnItsWay)
        there.copy_(self, non_blocking)
        return there


@pytest.mark.parametrize("staged", [416, 1000, 1 << 20])
def test_a_gpu_is_waited_for_once_per_buffer(tmp_path, monkeypatch, staged):
    waits = list[int]()

    class Stream:
        def synchronize(self):
            waits.append(len(OnItsWay.late))
            for place, values in OnItsWay.late:
                place.copy_(values)
            OnItsWay.late.clear()

    empty = torch.empty
    kinds = {False: torch.Tensor, True: Pinned}
    made = lambda *size, pin_memory=False, **rest: empty(*size, **rest).as_subclass(kinds[pin_memory])  # noqa: E731
    monkeypatch.setattr(torch, "empty", made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream())
    monkeypatch.setattr(read_plan, "CHUNK", 400)
    monkeypatch.setattr(read_plan, "STAGED", staged)
    monkeypatch.setattr(read_plan, "LONG_RUN", 100)
    split = [LogicalTensor(f"m{width}", (64, width), Role.HIDDEN, Shard(1, (width,), 2)) for width in (48, 96)]
    values = [torch.arange(64 * 48 * n, dtype=torch.float32).view(64, -1) for n in (1, 2)]
    stored = [Fragment(each, "master", 0, 1, 0, value.reshape(-1)) for each, value in zip(split, values)]
    path = save(tmp_path, 1, stored, Meta(1))
    for state, dtype in (("master", torch.float32), ("weight", torch.bfloat16)):
        wanted = [Fragment.empty(FragmentSpec.whole(each, state, 1, 3), dtype) for each in split]
        there = [replace(each, data=each.data.as_subclass(OnItsWay)) for each in wanted]
        open_checkpoint(path).read_into(there, threads=1, cast=["weight"])
        for each, value in zip(wanted, values):
            own = value[:, value.shape[1] // 3 : value.shape[1] * 2 // 3]
            assert torch.equal(each.data, own.reshape(-1).to(dtype))
    assert len(waits) == 2 if staged == 1 << 20 else len(waits) > 20  # 2 at the ends


def test_another_cut_in_the_checkpoint(tmp_path):
    """A writer that had the tensor whole, or cut along another dimension, is no obstacle."""
    values = torch.randn(24)
    for number, shard in enumerate([None, Shard(0), Shard(1)]):
        stored = replace(MATRIX, shard=shard)
        pieces = [values.view(4, 6)] if shard is None else values.view(4, 6).chunk(2, shard.dim)
        path = save(
            tmp_path / str(number),
            1,
            [Fragment(stored, "master", rank, len(pieces), 0, piece.reshape(-1)) for rank, piece in enumerate(pieces)],
            Meta(1),
        )
        for rank in range(3):
            found = open_checkpoint(path).read(FragmentSpec(MATRIX, "master", rank, 3, 1, 7))
            assert torch.equal(found.data, values.view(4, 6)[:, rank * 2 : rank * 2 + 2].reshape(-1)[1:])


def test_ranges_outside_a_shard_are_refused():
    with pytest.raises(ValueError, match="exceed a shard of 12"):
        FragmentSpec(MATRIX, "master", 0, 2, 4, 9)
    with pytest.raises(ValueError, match="tensor rank 2 is not one of 2"):
        FragmentSpec(MATRIX, "master", 2, 2, 0, 1)
    with pytest.raises(ValueError, match="1-D and contiguous"):
        Fragment(MATRIX, "master", 0, 1, 0, torch.zeros(48)[::2])


def test_no_code_is_executed_and_strange_headers_are_refused(tmp_path):
    path = store(tmp_path, master=torch.zeros(24))
    index = path / "index.safetensors"
    index.write_bytes((10**12).to_bytes(8, "little") + index.read_bytes()[8:])
    with pytest.raises(CheckpointError, match="index.safetensors"):
        open_checkpoint(path)


def read_with_little(path: Path, report: Path) -> None:
    """Read the second half of a tensor's columns in a process that says how much memory that took."""

    def used() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    Path("/proc/self/clear_refs").write_text("5")  # the peak of the tests themselves does not count
    checkpoint = open_checkpoint(path)
    tensor = checkpoint.tensors["big"]
    fragment = Fragment.empty(FragmentSpec.whole(tensor, "master", 1, 2), torch.bfloat16)
    fragment.data.zero_()
    before = used()
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    checkpoint.read_into([fragment], cast={"master"})
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    report.write_text(json.dumps({"before": max(before, peak_before), "peak": peak}))


def test_memory_is_a_chunk_whatever_the_tensor(tmp_path):
    """A 192 MiB tensor, read through a conversion, takes one buffer next to the target."""
    tensor = LogicalTensor("big", (3072, 16384), Role.HIDDEN, Shard(1))
    path = save(tmp_path, 1, [Fragment(tensor, "master", 0, 1, 0, torch.ones(3072 * 16384))], Meta(1))
    assert ended(read_with_little, path, tmp_path / "report") == 0
    report = json.loads((tmp_path / "report").read_text())
    assert report["peak"] - report["before"] < 2 * durable.CHUNK


M_MMAP_THRESHOLD = -3  # malloc.h


def reshape_with_little(path: Path, report: Path) -> None:
    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    # The large blocks that these tests have freed made malloc keep such blocks. In a new process it gives them back.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 << 10)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    reshape(open_checkpoint(path), path.with_name("out"), Layout(tensor=3, data=2, zero_stage=1), verify=True)
    report.write_text(json.dumps({"before": before, "peak": peak()}))


def test_memory_of_a_reshape_is_a_few_chunks(tmp_path):
    """However large the tensor is: 256 MiB here, read and written in pieces of 16 MiB, then hashed on both sides."""
    tensor = LogicalTensor("big", (4096, 16384), Role.HIDDEN, Shard(1))
    values = torch.arange(4096 * 16384, dtype=torch.float32)
    path = save(tmp_path, 1, [Fragment(tensor, "master", 0, 1, 0, values)], Meta(1))
    values_size = values.nbytes
    del values
    assert ended(reshape_with_little, path, tmp_path / "report") == 0
    report = json.loads((tmp_path / "report").read_text())
    assert report["peak"] - report["before"] < 6 * durable.CHUNK < values_size / 2


def test_one_process_writes_tensor_by_tensor(tmp_path):
    """As an importer does: values come in pieces, in the order of the items, and only when their turn has come."""
    model, asked = Model(), []
    items = [(FragmentSpec.whole(tensor, "master"), torch.float32) for tensor in model.tensors]

    def values(number):
        asked.append(number)
        flat = model.values[items[number][0].tensor.name, "master"].reshape(-1)
        yield flat[:1]
        yield flat[1:]

    path = write_tensors(tmp_path / "imported", items, values, meta(0))
    assert asked == list(range(len(items)))
    checkpoint = open_checkpoint(path, verify="checksums")
    for tensor in model.tensors:
        assert torch.equal(
            checkpoint.read(FragmentSpec.whole(tensor, "weight"), torch.float32).data,
            model.values[tensor.name, "master"].reshape(-1),
        )
        parts = list(streamed(checkpoint, FragmentSpec.whole(tensor, "weight")))
        assert torch.equal(torch.cat(parts), model.values[tensor.name, "master"].reshape(-1))
    for wrong, message in (
        (lambda number: [torch.zeros(2)], "values were announced, not"),
        (lambda number: [torch.zeros(items[number][0].length + 1)], "values were announced, not"),
        (lambda number: [torch.zeros(items[number][0].length).double()], "announced as torch.float32"),
    ):
        with pytest.raises(CheckpointError, match=message):
            write_tensors(tmp_path / "wrong", items, wrong, meta(0))
    assert [each.name for each in tmp_path.iterdir()] == ["imported"]


# -- real process groups -----------------------------------------------------------------------------------------------


def in_group(directory: Path) -> list:
    communicator = GroupCommunicator()
    rank, layout = communicator.rank, Layout(tensor=communicator.size)
    said = communicator.gather({"rank": rank, "text": "é" * rank})
    communicator.barrier()
    path = save(directory, 4, fragments(Model(seed=4), layout, rank), meta(4), communicator)
    open_checkpoint(path, verify="checksums", communicator=communicator)
    return said


def test_over_a_torch_process_group(tmp_path):
    expected = [{"rank": 0, "text": ""}, {"rank": 1, "text": "é"}]
    assert run(2, in_group, tmp_path) == [expected, expected]
    checkpoint = open_checkpoint(tmp_path / "step_00000004", verify="checksums")
    for fragment in fragments(Model(seed=4), Layout(), 0):
        assert torch.equal(checkpoint.read(fragment.spec).data, fragment.data)


def test_a_message_has_an_end() -> None:
    """Of a checkpoint of ten thousand ranks all files may be lost at once, and of a model of eighty layers all tensors
    wrong.
    """
    text = str(CheckpointError("x", [f"data/{rank} is lost" for rank in range(10_000)]))
    assert len(text.splitlines()) == 102 and "x: 10000 problems" in text and text.endswith("and 9900 more")
    layers = [
        f"missing: layers.{layer}.mlp.{name}.weight is in the run" for layer in (0, 1, 2, 4) for name in ("up", "down")
    ]
    assert by_layer(["missing: head.weight", *layers, layers[0]]) == [
        "missing: head.weight",
        "missing: layers.0-2,4.mlp.up.weight is in the run",
        "missing: layers.0-2,4.mlp.down.weight is in the run",
    ]
    assert brief(["a", "b", "c", "d", "e"]) == "a; b; c; and 2 more" and brief(["a"]) == "a"


def open_and_tell(path: str) -> tuple[list[tuple[int, int]], str]:
    """Which share of the index this rank read, and what it received of the checkpoint."""
    shares, real = [], HashTree.check_share
    HashTree.check_share = lambda tree, share: shares.append(share) or real(tree, share)
    try:
        open_checkpoint(Path(path), verify="none", communicator=GroupCommunicator())
        told = "intact"
    except CheckpointError as error:
        told = str(error)
    finally:
        HashTree.check_share = real
    return shares, told


def test_the_ranks_share_the_index_and_all_hear_of_its_damage(tmp_path):
    path = save(tmp_path, 1, fragments(Model(), Layout(), 0), meta(1))
    shares = [[(rank, 3)] for rank in range(3)]
    assert run(3, open_and_tell, str(path)) == [(each, "intact") for each in shares]
    index = path / INDEX_NAME
    data = bytearray(index.read_bytes())
    data[-200] ^= 1
    index.write_bytes(data)
    found, told = zip(*run(3, open_and_tell, str(path)))
    assert list(found) == shares
    assert all(INDEX_NAME in each and "does not have the checksum" in each for each in told), told
