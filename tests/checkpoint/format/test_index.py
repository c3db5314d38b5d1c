"""Searching an index: the rows that a range needs, found by checking few others."""

from __future__ import annotations

import random
from math import prod

import numpy as np
import pytest

from megatron.checkpoint.format.index import Index
from megatron.checkpoint.format.table import ROW, Vocabulary
from megatron.parallel.layout.shard import LogicalTensor, Role, Shard

TENSORS = [
    LogicalTensor("a", (40, 30), Role.HIDDEN, Shard(0, None, 4)),
    LogicalTensor("b", (7, 30), Role.HIDDEN, Shard(1)),
    LogicalTensor("c", (900,), Role.NORM),
]


def index_of(ranks: int, cuts: int, seed: int, looked: set[int]) -> Index:
    """Each shard in pieces that are cut at random. `looked` takes the rows that are asked for."""
    chance, rows = random.Random(seed), []
    for number, tensor in enumerate(TENSORS):
        own = ranks if tensor.shard is not None else 1
        for state in range(2):
            for rank in range(own):
                size = prod(tensor.local_shape(rank, own))
                places = sorted({0, *(chance.randrange(size) for _ in range(cuts))})
                for start, end in zip(places, [*places[1:], size]):
                    rows.append((number, state, 1, rank, own, len(rows), start, end - start, 0, 0))
    return Index(
        Vocabulary(TENSORS, ["x", "y"]), np.array(rows, ROW), trust=lambda begin, end: looked.update(range(begin, end))
    )


@pytest.mark.parametrize("cuts", [0, 1, 20])
@pytest.mark.parametrize("ranks", [1, 3, 10])
def test_a_range_is_found_as_by_looking_at_all(ranks, cuts):
    looked: set[int] = set()
    index, chance = index_of(ranks, cuts, 7, looked), random.Random(8)
    everything = index.rows
    for name, state in index.stored():
        run = index.find(name, state)
        number = next(place for place, tensor in enumerate(TENSORS) if tensor.name == name)
        own = everything[(everything["tensor"] == number) & (everything["state"] == "xy".index(state))]
        assert (
            len(run) == len(own)
            and run.ranks == own[0]["tensor_ranks"]
            and [run[0], run[len(run) - 1]] == [own[0], own[-1]]
        )
        for rank in range(run.ranks):
            size = prod(run.tensor.local_shape(rank, run.ranks))
            for low, high in [(0, size), (0, 1), (size - 1, size), *(ordered(chance, size) for _ in range(20))]:
                wanted = [
                    row
                    for row in own
                    if row["tensor_rank"] == rank and row["start"] < high and row["start"] + row["length"] > low
                ]
                assert run.between(rank, low, high).tolist() == [row.tolist() for row in wanted], (
                    name,
                    rank,
                    low,
                    high,
                )
    assert index.find("a", "z") is None and index.find("d", "x") is None


def ordered(chance: random.Random, size: int) -> tuple[int, int]:
    low, high = sorted((chance.randrange(size), chance.randrange(size)))
    return low, high + 1


def test_equal_pieces_are_found_where_they_are_expected():
    """As ranks of ZeRO 3 cut each tensor. One piece of 10,000, and its neighbours, wherever it is."""
    looked: set[int] = set()
    tensor, pieces = LogicalTensor("w", (3 * 10_000,), Role.NORM), 10_000
    rows = np.zeros(pieces, ROW)
    rows["tensor_ranks"], rows["start"], rows["length"], rows["file"] = 1, np.arange(pieces) * 3, 3, np.arange(pieces)
    index = Index(Vocabulary([tensor], ["x"]), rows, trust=lambda begin, end: looked.update(range(begin, end)))
    for piece in (0, 1, 4_999, 9_998, 9_999):
        looked.clear()
        assert index.find("w", "x").between(0, 3 * piece, 3 * piece + 3)["file"].tolist() == [piece]
        assert looked <= {piece - 1, piece, piece + 1}
