"""Placement of experts: against all placements of small cases, and cases whose optimum is known."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.config.problems import UserError
from megatron.kinds.moe.placement import (
    crossings,
    in_order,
    placed,
    placed_on_hosts,
    read_places,
    swept,
    transitions,
    within,
)

pytest.importorskip("scipy")


def every_layer(experts: int, ranks: int) -> list[tuple[int, ...]]:
    """All ways to give each rank the same number of experts."""
    ways = itertools.product(range(ranks), repeat=experts)
    return [each for each in ways if all(each.count(rank) == experts // ranks for rank in range(ranks))]


def best(counts: np.ndarray, ranks: int) -> float:
    ways = every_layer(counts.shape[1], ranks)
    return max(
        sum(count[np.equal.outer(a, b)].sum() for count, a, b in zip(counts, each, each[1:]))
        for each in itertools.product(map(np.array, ways), repeat=len(counts) + 1)
    )


@pytest.mark.parametrize("seed", range(4))
def test_no_placement_is_better(seed: int) -> None:
    """Four experts on two ranks, three layers: 6³ placements. Six on three, two layers: 90²."""
    draw = np.random.default_rng(seed)
    for layers, experts, ranks in ((3, 4, 2), (2, 6, 3)):
        counts = draw.integers(0, 50, (layers - 1, experts, experts)).astype(float)
        found = placed(counts, ranks)
        assert found.proven
        assert np.bincount(found.ranks_LE.ravel()).tolist() == [layers * experts // ranks] * ranks
        assert within(counts, found.ranks_LE) == best(counts, ranks) >= within(counts, swept(counts, ranks))


@pytest.mark.parametrize(("layers", "hosts", "ranks"), [(3, 2, 4), (2, 2, 4)])
def test_transitions_are_within_hosts_first(layers: int, hosts: int, ranks: int) -> None:
    """Against all placements of four experts, by the pair of transitions within a host and within a rank."""
    counts = np.random.default_rng(layers).random((layers - 1, 4, 4))
    found, own = placed_on_hosts(counts, hosts, ranks), ranks // hosts
    assert found.proven and all(sorted(each) == list(range(ranks)) for each in found.ranks_LE.tolist())
    ways = itertools.product(itertools.permutations(range(ranks)), repeat=layers)
    wanted = max((within(counts, np.array(each) // own), within(counts, np.array(each))) for each in ways)
    assert (within(counts, found.ranks_LE // own), within(counts, found.ranks_LE)) == pytest.approx(wanted)
    assert placed_on_hosts(counts, 1, 2).ranks_LE.tolist() == placed(counts, 2).ranks_LE.tolist()
    with pytest.raises(ValueError, match="must divide"):
        placed_on_hosts(counts, 3, 4)


WRONG: list[Any] = [None, [1], {"1": [[0, 1], [2, 3]]}]
LAYER: list[Any] = [[[0, 1], [2, 2]], [[0], [1, 2, 3]], [[0, 1], ["2", 3]], [[0, 1, 2, 3]], "ab", [0]]


@pytest.mark.parametrize("experts", WRONG + [{"1": [[0, 1], [2, 3]], "2": each} for each in LAYER])
def test_other_files_of_places_are_refused(tmp_path: Path, experts: Any) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"experts": experts}))
    with pytest.raises(UserError, match="a.json"):
        read_places(tmp_path / "a.json", {1: 4, 2: 4}, 2)
    (tmp_path / "b.json").write_text(json.dumps({"experts": {"1": [[3, 1], [2, 0]]}}))
    assert read_places(tmp_path / "b.json", {1: 4}, 2) == {1: [[3, 1], [2, 0]]}


def test_blocks_are_within_ranks_and_even_transitions_are_not() -> None:
    """Experts that follow each other in pairs, in any order: all within. Even numbers: 1 / G whatever is done."""
    draw, experts, layers = np.random.default_rng(0), 8, 5
    orders = [draw.permutation(experts) for _ in range(layers)]
    counts = np.zeros((layers - 1, experts, experts))
    for count, before, after in zip(counts, orders, orders[1:]):
        for block in range(4):
            count[np.ix_(before[2 * block : 2 * block + 2], after[2 * block : 2 * block + 2])] = 3
    assert within(counts, placed(counts, 4).ranks_LE) == counts.sum() > 2 * within(counts, in_order(layers, experts, 4))
    even = np.ones((2, experts, experts))
    assert within(even, placed(even, 4, seconds=1).ranks_LE) == even.sum() / 4
    with pytest.raises(ValueError, match="divide the 8 experts"):
        placed(even, 3)


def test_transitions_and_rows_to_other_ranks() -> None:
    """Against loops over tokens. Expert 4 stands for none."""
    draw = np.random.default_rng(1)
    for k in (1, 2):
        experts = [np.stack([draw.permutation(5)[:k] for _ in range(30)]) for _ in range(3)]
        places = np.stack([draw.permutation([0, 0, 1, 1]) for _ in range(3)])
        counts = np.zeros((2, 4, 4))
        for layer, token in itertools.product(range(2), range(30)):
            for a, b in itertools.product(experts[layer][token], experts[layer + 1][token]):
                if a < 4 and b < 4:
                    counts[layer, a, b] += 1 / k**2
        assert np.allclose(transitions(experts, 4), counts)
        two = one = 0
        for token in range(30):
            now = home = token % 2
            for layer in range(3):
                there = [int(places[layer, each]) if each < 4 else None for each in experts[layer][token]]
                two += sum(2 for each in there if each not in (None, home))
                best_rank = now if there[0] is None else there[0]
                one += (best_rank != now) + sum(2 for each in there[1:] if each not in (None, best_rank))
                now = best_rank
        assert crossings(experts, places) == pytest.approx((two / 90, one / 90))
