"""The tables of many files as one: the same whatever fits in memory at once."""

from __future__ import annotations

import errno
import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.checkpoint import CheckpointError, save
from megatron.checkpoint.format import rankfile
from megatron.checkpoint.format.errors import StoreRefuses
from megatron.checkpoint.format.index import Merged
from megatron.checkpoint.format.manifest import write_merged
from megatron.checkpoint.format.table import ROW, Vocabulary
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.shard import LogicalTensor, Role, Shard
from tests.checkpoint.model import Model, Together, fragments, meta

TENSORS = [LogicalTensor(f"layers.{number}.weight", (600,), Role.NORM, Shard(0)) for number in range(9)]
STATES = ["weight", "master", "exp_avg"]
LAYOUT = Layout(tensor=2, data=2, zero_stage=1)


def pieces(seed: int, files: int) -> list[tuple[str, np.ndarray]]:
    """Every state of every tensor, cut at random among files. Each has its own numbers for its rows."""
    chance = random.Random(seed)
    owned: list[list[tuple[int, int, int, int, int]]] = [[] for _ in range(files)]
    for tensor in range(len(TENSORS)):
        for state in range(len(STATES)):
            for rank in range(2):
                places = sorted({0, *(chance.randrange(300) for _ in range(5))})
                for start, end in zip(places, [*places[1:], 300]):
                    owned[chance.randrange(files)].append((tensor, state, rank, start, end - start))
    found = []
    for own in owned:
        vocabulary, rows = Vocabulary(), np.zeros(len(own), ROW)
        chance.shuffle(own)
        for place, (tensor, state, rank, start, length) in enumerate(own):
            numbers = (vocabulary.tensor(TENSORS[tensor]), vocabulary.state(STATES[state]))
            rows[place] = (*numbers, 1, rank, 2, 0, start, length, chance.randrange(9999), chance.randrange(1 << 60))
        found.append((vocabulary.to_json(), rows))
    return found


@pytest.mark.parametrize("batch", [1, 40, 200, 10**6])
@pytest.mark.parametrize("files", [1, 7, 40])
def test_rows_are_sorted_however_few_fit_in_memory(tmp_path: Path, monkeypatch, batch: int, files: int):
    monkeypatch.setattr("megatron.checkpoint.format.index.BATCH", batch)
    given = pieces(files, files)
    with Merged(given, tmp_path) as merged:
        rows = np.concatenate(list(merged.parts()))
        names, states = [tensor.name for tensor in merged.vocabulary.tensors], merged.vocabulary.states
        found = [_readable(row, names, states) for row in rows]
        expected = []
        for number, (text, table) in enumerate(given):
            local = Vocabulary.from_json(text)
            own = [_readable(row, [tensor.name for tensor in local.tensors], local.states) for row in table]
            expected += [{**row, "file": number} for row in own]
        expected.sort(
            key=lambda row: (names.index(row["tensor"]), states.index(row["state"]), row["tensor_rank"], row["start"])
        )
        assert found == expected and len(merged) == len(expected)
        for group, end in zip(merged.groups, [*merged.groups["first"][1:], len(rows)], strict=True):
            for name in ("tensor", "state", "dtype", "tensor_ranks"):
                assert (rows[name][group["first"] : end] == group[name]).all()
        assert len(merged.groups) == len(TENSORS) * len(STATES)
    assert list(tmp_path.iterdir()) == []


def _readable(row: np.void, names: list[str], states: list[str]) -> dict:
    values = {name: row[name].item() for name in ROW.names}
    return {**values, "tensor": names[row["tensor"]], "state": states[row["state"]]}


def test_a_checkpoint_is_the_same_however_few_rows_fit_in_memory(tmp_path: Path, monkeypatch):
    model = Model(seed=2)

    def head(batch: int) -> list[bytes]:
        monkeypatch.setattr("megatron.checkpoint.format.index.BATCH", batch)
        folder = tmp_path / str(batch)
        Together(4).run(lambda member: save(folder, 2, fragments(model, LAYOUT, member.rank), meta(2), member))
        path = folder / "step_00000002"
        assert sorted(each.name for each in path.iterdir()) == [
            "data", "index.safetensors", "manifest.json", "meta.json",
        ]  # fmt: skip
        return [(path / name).read_bytes() for name in ("index.safetensors", "manifest.json")]

    assert head(3) == head(10**6)


def test_a_disk_that_is_full_of_waiting_rows_is_an_error_on_all(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("megatron.checkpoint.format.index.BATCH", 3)
    original = os.write

    def full(handle, data):
        if os.readlink(f"/proc/self/fd/{handle}").endswith("(deleted)"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(handle, data)

    monkeypatch.setattr(os, "write", full)
    model = Model(seed=2)
    results = Together(4).run(lambda member: save(tmp_path, 2, fragments(model, LAYOUT, member.rank), meta(2), member))
    assert all(isinstance(each, StoreRefuses) and "No space left" in str(each) for each in results)
    assert list(tmp_path.iterdir()) == []


def test_gaps_are_found_in_parts_as_in_the_whole(tmp_path: Path, monkeypatch):
    chance, given, lost = random.Random(1), [], set()
    for text, rows in pieces(7, 7):
        place, known = chance.randrange(len(rows)), Vocabulary.from_json(text)
        row = rows[place]
        lost.add((known.tensors[row["tensor"]].name, known.states[row["state"]], row["tensor_rank"].item()))
        given.append((text, np.delete(rows, place)))
    for batch in (20, 10**6):
        monkeypatch.setattr("megatron.checkpoint.format.index.BATCH", batch)
        with pytest.raises(CheckpointError) as caught:
            write_merged(tmp_path, given, [], whole=True)
        told = [
            re.fullmatch(r"(\S+) \((\w+)\): no rank wrote elements .* of tensor rank (\d) of 2", each)
            for each in caught.value.problems
        ]
        assert {(each[1], each[2], int(each[3])) for each in told} == lost and len(told) == len(lost)


def test_what_is_wrong_with_a_file_names_it(tmp_path: Path, monkeypatch):
    """Its names mean other tensors than in files before it, it is damaged, the disk does not give it."""
    model = Model(seed=2)

    def told(change) -> str:
        with monkeypatch.context() as patched:
            change(patched)
            own = lambda member: save(tmp_path, 2, fragments(model, LAYOUT, member.rank), meta(2), member)  # noqa: E731
            results = Together(4).run(own)
        assert all(isinstance(each, CheckpointError) for each in results)
        assert len({str(each) for each in results}) == 1 and list(tmp_path.iterdir()) == []
        return str(results[0])

    read = rankfile.read_table
    name = "data/0000/rank_00002.safetensors"

    def second(change) -> Callable:
        return lambda root, record: change(root, record) if record.rank == 2 else read(root, record)

    def other_tensors(root, record):
        text, rows = read(root, record)
        return text.replace('"keep_fp32": false', '"keep_fp32": true'), rows

    def other_numbers(root, record):
        text, rows = read(root, record)
        rows = rows.copy()
        rows["tensor"] += 1000
        return text, rows

    def damaged(root, record):
        path = root / record.path
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        return read(root, record)

    for change, words in ((other_tensors, "is two tensors"), (other_numbers, "damaged"), (damaged, "checksum")):
        said = told(lambda patched, change=change: patched.setattr(rankfile, "read_table", second(change)))
        assert f"{name}: " in said and words in said, said

    def failing(handle, buffer, offset):
        if os.readlink(f"/proc/self/fd/{handle}").endswith(name):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(handle, buffer, offset)

    original = rankfile.read_fully
    said = told(lambda patched: patched.setattr(rankfile, "read_fully", failing))
    assert name in said and "Input/output error" in said
