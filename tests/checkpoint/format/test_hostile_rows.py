"""Checkpoints of strangers: rows of an index and of a rank's table that no version writes, with checksums that fit."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron.checkpoint import CheckpointError, FragmentSpec, open_checkpoint, save
from megatron.checkpoint.format.index import GROUP, Index, checksum, refuse_strange
from megatron.checkpoint.format.rankfile import read_table
from megatron.checkpoint.format.table import Vocabulary
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.shard import LogicalTensor, Role, Shard
from tests.checkpoint.format.former_format import to_format_1
from tests.checkpoint.model import Model, Together, fragments, meta
from tests.checkpoint.rewritten import rewrite_head

STRANGE = [
    {"file": 99},
    {"file": -1},
    {"tensor": 10**6},
    {"tensor": -1},
    {"state": 99},
    {"state": -1},
    {"dtype": 99},
    {"dtype": -1},
    {"tensor_rank": 7},
    {"tensor_rank": -1},
    {"tensor_ranks": 0},
    {"tensor_ranks": -4},
    {"tensor_ranks": 2**31 - 1},
    {"start": -5},
    {"start": 2**62},
    {"length": -1},
    {"length": 2**62},
    {"offset": -8},
    {"offset": 2**62},
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(tmp_path, 3, fragments(Model(seed=3), Layout(), 0), meta(3))


def rewrite_index(path: Path, index: Index, form: int) -> None:
    """Index and manifest of a checkpoint with these rows, in one of the formats."""
    records = list(open_checkpoint(path).records)
    rewrite_head(path, index, records)
    if form == 1:
        former = json.loads(json.loads((path / "former.json").read_text())["content"])
        spliced = (path / "former.safetensors").read_bytes()
        rows = index.rows.tobytes()
        (path / "index.safetensors").write_bytes(spliced[: len(spliced) - len(rows)] + rows)
        data = (path / "index.safetensors").read_bytes()
        former["parts"]["index.safetensors"] = {"size": len(data), "checksum": checksum(data)}
        text = json.dumps(former)
        (path / "manifest.json").write_text(json.dumps({"checksum": checksum(text.encode()), "content": text}))


@pytest.mark.parametrize("place", ["first", "all"])
@pytest.mark.parametrize("change", STRANGE, ids=str)
@pytest.mark.parametrize("form", [1, 2])
def test_rows_of_an_index_that_cannot_be_are_damage(path: Path, form: int, change: dict, place: str):
    """The reader raises an exception, soon, and every reader shares it with the other ranks."""
    whole = open_checkpoint(path)
    wanted = [FragmentSpec.whole(tensor, state) for tensor, state in _stored(whole)]
    rows = whole.index.rows.copy()
    if form == 1:
        shutil.copytree(path, path.parent / "former")
        former = to_format_1(path.parent / "former")
        shutil.copy(former / "manifest.json", path / "former.json")
        shutil.copy(former / "index.safetensors", path / "former.safetensors")
    for name, value in change.items():
        rows[name][0 if place == "first" else slice(None)] = value
    index = Index(whole.index.vocabulary, rows, whole.index.groups.copy())
    for name in {"tensor", "state", "dtype", "tensor_ranks"} & change.keys():
        index.groups[name][0 if place == "first" else slice(None)] = change[name]
    rewrite_index(path, index, form)
    with pytest.raises(CheckpointError):
        opened = open_checkpoint(path, verify="none")
        for spec in wanted:
            opened.read(spec)


def _stored(checkpoint) -> list:
    return [(checkpoint.tensors[name], state) for name, state in sorted(checkpoint.stored)]


@pytest.mark.parametrize("change", [each for each in STRANGE if "file" not in each], ids=str)
def test_rows_of_a_file_that_cannot_be_are_damage(path: Path, change: dict):
    """A rank that searches for damage comes to an end, and says what it has found."""
    whole = open_checkpoint(path)
    (record,) = whole.records
    file = path / record.path
    rows = read_table(path, record)[1].copy()
    for name, value in change.items():
        rows[name][0] = value
    rows["checksum"][0] ^= 1  # or no reader asks what the row is of
    content = file.read_bytes()[: record.end] + rows.tobytes()
    file.write_bytes(content)
    known = replace(record, table=checksum(rows.tobytes()))
    rewrite_head(path, whole.index, [known])
    with pytest.raises(CheckpointError, match="rank_00000"):
        open_checkpoint(path, verify="checksums")


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [-4]},
        {"shape": [2.5]},
        {"shape": "4"},
        {"shard": {"dim": 7, "parts": None, "unit": 1}},
        {"shard": {"dim": -1, "parts": None, "unit": 1}},
        {"shard": {"dim": 0, "parts": None, "unit": 0}},
        {"shard": {"dim": 0, "parts": [1, 1], "unit": 1}},
        {"shard": {"dim": 0, "parts": None}},
    ],
    ids=str,
)
def test_tensors_that_cannot_be_are_refused(path: Path, change: dict):
    values = json.loads(open_checkpoint(path).index.vocabulary.to_json())
    assert Vocabulary.from_json(json.dumps(values)).tensors == open_checkpoint(path).index.vocabulary.tensors
    values["tensors"][0] |= change
    with pytest.raises((ValueError, TypeError, LookupError)):
        Vocabulary.from_json(json.dumps(values))


def test_columns_divide_the_ranks_of_a_tensor():
    vocabulary = Vocabulary([LogicalTensor("a", (4, 4), Role.HIDDEN, Shard(0, across=1, columns=2))], ["x"])
    groups = np.zeros(1, GROUP)
    for ranks in (1, 2, 4):  # an optimizer's owner of the whole is one of one
        groups["tensor_ranks"] = ranks
        refuse_strange(groups, vocabulary, 1)
    for ranks in (3, 5):
        groups["tensor_ranks"] = ranks
        with pytest.raises(ValueError, match="columns that do not divide"):
            refuse_strange(groups, vocabulary, 1)


def test_a_file_of_another_rank_or_step_is_not_read(tmp_path: Path):
    """No reader that checks only sizes, as evaluation does, takes one file for another of the same size."""
    layout = Layout(data=2, zero_stage=1)
    for step in (1, 2):
        model = Model(seed=step)
        Together(2).run(
            lambda member: save(tmp_path, step, fragments(model, layout, member.rank), meta(step), member)  # noqa: B023
        )
    one, two = (tmp_path / f"step_0000000{step}" for step in (1, 2))
    names = [record.path for record in open_checkpoint(one).records]
    assert len(names) == 2
    shutil.copy(one / names[0], two / names[0])
    checkpoint = open_checkpoint(two, verify="sizes")
    read = 0
    with pytest.raises(CheckpointError, match="it is another file"):
        for tensor, state in _stored(checkpoint):
            checkpoint.read(FragmentSpec.whole(tensor, state))
            read += 1
    assert read < len(checkpoint.stored)
