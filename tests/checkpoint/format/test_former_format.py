"""Checkpoints of format 1 are still read: one that its own version wrote, and any that is rewritten to it."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import CheckpointError, Fragment, FragmentSpec, Meta, open_checkpoint, save
from megatron.checkpoint.reshape import parse_layout, reshape
from megatron.checkpoint.save.store import Store
from megatron.checkpoint.save.transfer import download, upload
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.shard import LogicalTensor, Role, Shard
from tests.checkpoint.format.former_format import to_format_1
from tests.checkpoint.model import Model, Together, fragments, meta
from tests.checkpoint.test_tools import tool

GOLDEN = Path(__file__).parent / "format_1" / "step_00000003"  # as the last version that wrote format 1 has left it
UP = LogicalTensor("layers.0.mlp.up.weight", (6, 4), Role.HIDDEN, Shard(0, (4, 2), 1), matrices=(4, 2))
NORM = LogicalTensor("norm.weight", (5,), Role.NORM)
STATES = {"exp_avg": 0.5, "master": 0.0, "weight": 0.0}


def values(tensor: LogicalTensor, state: str, rank: int) -> torch.Tensor:
    """State of tensor rank `rank` of 2: numbers in order."""
    found = torch.arange(12 if tensor is UP else 5, dtype=torch.float32) + 100 * rank + STATES[state]
    return found.bfloat16() if state == "weight" else found


def owned(rank: int) -> list[Fragment]:
    found = []
    for state in STATES:
        own = values(UP, state, rank)
        found += [Fragment(UP, state, rank, 2, 0, own[:7].clone()), Fragment(UP, state, rank, 2, 7, own[7:].clone())]
        found += [Fragment(NORM, state, 0, 2, 0, values(NORM, state, 0))] if rank == 0 else []
    return found


def facts() -> Meta:
    return Meta(
        3,
        config="model: {hidden_size: 4}\n",
        data={"samples": 24},
        layout={"tensor": 2},
        versions={"megatron": "0.1.0"},
    )


def test_what_rewriting_gives_is_what_that_version_wrote(tmp_path):
    """So the other tests here, which rewrite, speak of its checkpoints, and the ranks' files are still the same."""
    (path, _) = Together(2).run(lambda member: save(tmp_path, 3, owned(member.rank), facts(), member))
    to_format_1(path)
    names = sorted(each.relative_to(GOLDEN) for each in GOLDEN.rglob("*") if each.is_file())
    assert names == sorted(each.relative_to(path) for each in path.rglob("*") if each.is_file()) and len(names) == 5
    for name in names:
        assert (path / name).read_bytes() == (GOLDEN / name).read_bytes(), name


def test_it_is_read():
    checkpoint = open_checkpoint(GOLDEN, verify="checksums")
    assert checkpoint.step == 3 and checkpoint.meta.data == {"samples": 24}
    assert checkpoint.stored == {
        (tensor.name, state): torch.bfloat16 if state == "weight" else torch.float32
        for tensor in (UP, NORM)
        for state in STATES
    }
    for state in STATES:
        for rank in range(2):
            assert torch.equal(checkpoint.read(FragmentSpec.whole(UP, state, rank, 2)).data, values(UP, state, rank))
        assert torch.equal(checkpoint.read(FragmentSpec.whole(NORM, state)).data, values(NORM, state, 0))


@pytest.fixture
def golden(tmp_path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "checkpoints" / GOLDEN.name))


def test_every_flipped_byte_is_found(golden):
    chance = random.Random(3)
    for path in sorted(each for each in golden.rglob("*") if each.is_file()):
        whole = path.read_bytes()
        for place in [0, 9, len(whole) - 1, *(chance.randrange(len(whole)) for _ in range(8))]:
            changed = bytearray(whole)
            changed[place] ^= 0x10
            path.write_bytes(changed)
            results = Together(3).run(lambda member: open_checkpoint(golden, verify="checksums", communicator=member))
            assert all(isinstance(each, CheckpointError) and path.name in str(each) for each in results), (path, place)
            path.write_bytes(whole[:-1])
            with pytest.raises(CheckpointError, match=path.name):
                open_checkpoint(golden)
            path.write_bytes(whole)
    open_checkpoint(golden, verify="checksums")


@pytest.mark.parametrize("layout", [Layout(), Layout(pipeline=3), Layout(tensor=2, data=2, zero_stage=3)])
def test_any_layout_resumes_from_it(tmp_path, layout):
    model, wrote = Model(seed=4), Layout(tensor=2, pipeline=2, data=2, zero_stage=1)
    path = Together(wrote.world_size).run(
        lambda member: save(tmp_path, 4, fragments(model, wrote, member.rank), meta(4), member)
    )[0]
    to_format_1(path)

    def resume(member) -> bool:
        checkpoint = Store(tmp_path, member).resume("auto").checkpoint
        wanted = fragments(model, layout, member.rank, replicas=True)
        targets = [Fragment.empty(each.spec, each.data.dtype) for each in wanted]
        checkpoint.check([each.spec for each in targets], communicator=member)
        checkpoint.read_into(targets, communicator=member)
        return all(torch.equal(target.data, each.data) for target, each in zip(targets, wanted, strict=True))

    assert Together(layout.world_size).run(resume) == [True] * layout.world_size


def test_tools_read_it(golden, tmp_path, capsys):
    """Reshaping writes the new format, with the same values. Nothing else differs."""
    out = tmp_path / "out"
    assert tool("inspect").main([str(golden), "--json"]) == 0
    assert '"fragments": 15' in capsys.readouterr().out
    reshape(open_checkpoint(golden), out, parse_layout("pipeline=2"), verify=True)
    assert b'format\\": 2' in (out / "manifest.json").read_bytes()
    assert tool("diff").main([str(golden), str(out)]) == 0
    assert "tensors are equal" in capsys.readouterr().out


def test_it_travels_and_counts_as_a_checkpoint(golden, tmp_path):
    upload(golden, f"file://{tmp_path}/there")
    here = download(f"file://{tmp_path}/there/{golden.name}", tmp_path / "here")
    assert {each.relative_to(here): each.read_bytes() for each in here.rglob("*") if each.is_file()} == {
        each.relative_to(GOLDEN): each.read_bytes() for each in GOLDEN.rglob("*") if each.is_file()
    }
    store = Store(golden.parent)
    save(golden.parent, 4, owned_alone(), Meta(4))
    assert store.retain(1) == [golden.name]


def owned_alone() -> list[Fragment]:
    return [Fragment.of(FragmentSpec.whole(NORM, "master"), values(NORM, "master", 0))]
