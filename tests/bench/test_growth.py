"""Growth with the world, counted: no rank has more groups, and nothing grows faster than the world."""

from __future__ import annotations

import itertools
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from bench.launch.growth import PIPELINE, STATES, TENSOR, checkpoint, groups, launcher, stored_rows, tables, tensors
from megatron.checkpoint.format.index import INDEX_NAME
from megatron.checkpoint.format.manifest import write_merged
from megatron.checkpoint.format.rankfile import FileRecord
from megatron.checkpoint.format.table import Vocabulary, coverage_problems


@pytest.mark.parametrize("world", [160, 1600])
def test_groups_of_a_rank(world: int):
    """One of each axis that it shares: tensor, pipeline and data. Their members are the axes' sizes."""
    found = groups(world)
    assert found["groups"] == 3 and found["members"] == TENSOR + PIPELINE + world // (TENSOR * PIPELINE)


def test_what_a_rank_reads_of_a_checkpoint_does_not_grow_with_the_world():
    """Bytes, which no load of the machine changes."""
    small, large = checkpoint(64), checkpoint(640)
    assert large["index: KiB"] > small["index: KiB"] + 576 * 3 * 52 / 1024  # at least a row more of each state and rank
    for name in ("manifest: KiB", "resume: KiB read", "resume: KiB heard"):
        assert large[name] < 1.05 * small[name], name
    hosts = [launcher(world)["launch: KiB to a host"] for world in (160, 1600)]
    assert hosts[1] - hosts[0] < 0.02  # digits of the numbers of hosts and ranks


def test_under_zero_3_a_rank_reads_two_blocks_of_each_tensors_rows_at_most():
    """Each rank has a piece of each: its row in one block or, with its neighbours, in two, and the levels above them.
    Of the files it reads the records, some of the 640 of 64 bytes each."""
    found, mine = checkpoint(640, zero=3), len(tensors()) // PIPELINE + 1
    constant = checkpoint(64, zero=1)["resume: KiB read"]  # vocabulary and groups, and more
    blocks = 2 * mine * len(STATES) + 640 * 64 / 4096
    assert found["resume: KiB read"] < constant + 4 * blocks * (1 + 1 / 16)
    assert found["index: KiB"] > 10_000


def test_the_pretended_checkpoint_has_every_element_once():
    for zero in (1, 3):
        rows = stored_rows(64, zero)
        assert coverage_problems(rows, Vocabulary(tensors(), list(STATES))) == []
        assert set(rows["file"]) == set(range(64))
        shares = np.bincount(rows["file"], rows["length"], minlength=64)
        assert shares.sum() == len(STATES) * sum(np.prod(tensor.shape) for tensor in tensors())


def test_what_rank_0_holds_to_make_an_index_does_not_grow_with_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """ZeRO 3, where each rank has a piece of each tensor. Held are some batches with the number of rows of each group,
    the files' records, and 16 bytes for each 4096 of the index."""
    batch, records = 1 << 14, list[FileRecord]()
    monkeypatch.setattr("megatron.checkpoint.format.index.BATCH", batch)
    given = tables(640, 3, records)
    first = next(given)  # makes all rows, before the memory is checked
    tracemalloc.start()
    write_merged(tmp_path, itertools.chain([first], given), records, whole=True)
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    size = os.path.getsize(tmp_path / INDEX_NAME)
    groups = len(tensors()) * len(STATES) * 36 * size / 52 / batch
    assert size > 15e6
    assert held < 7 * batch * 52 + groups + 640 * 1500 + size * 16 / 4096
