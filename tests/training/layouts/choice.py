"""Which cases of tests/layouts.yml `make layouts` trains, and which wait for `make test-slow`.

Most cases differ from others in what they combine, not in what they run through. The chosen cases cover all of it: each
architecture meets each mechanism that it is listed with, and each recipe meets each of its layouts. In each recipe and
part of the matrix each two mechanisms meet that some case has together. A defect of a mechanism, of an architecture
under a mechanism, or of two mechanisms together is then seen by a case that was chosen. Only the slow cases find
defects of one architecture under two mechanisms at once. Groups of runs with `slow: true` all wait: where a recipe
differs only by the optimizer, a few cases go through all that it changes.
"""

from __future__ import annotations

import heapq
from functools import cache
from itertools import combinations

import pytest

from tests.training.matrix import Case, cases, part

_FURTHER = ("sequence", "expert_tensor", "context_cut", "pipeline_split", "stages_per_rank")


def mechanisms(case: Case) -> list[str]:
    """Mechanisms of a case, next to its architecture."""
    parallel, training, zero = (case.values.get(name, {}) for name in ("parallel", "training", "zero"))
    names = ("tensor", "columns", "pipeline", "context", "folded", "depth", "expert")
    axes = [axis for axis in names if parallel.get(axis, 1) > 1]
    data = case.ranks
    for axis in ("tensor", "columns", "pipeline", "context", "folded"):
        data //= parallel.get(axis, 1)
    several = training["global_batch_size"] // data > training["micro_batch_size"]
    return [
        *axes,
        *(name for name in _FURTHER if name in parallel),
        *(f"{name} {parallel[name]}" for name in ("context_method", "schedule") if name in parallel),
        *(["data"] if data > 1 else []),
        *(["offload"] if "offload_optimizer" in zero else []),
        f"ZeRO {zero.get('stage', 1)}",
        f"recomputation {training.get('activation_checkpointing', {}).get('mode', 'none')}",
        *(["chunks"] if training.get("sequence_chunks", 1) > 1 else []),
        "several micro-batches" if several else "one micro-batch",
    ]


def meetings(case: Case) -> set[tuple[str, ...]]:
    """Pairs of mechanisms in a case."""
    through = mechanisms(case)
    return {
        (case.recipe, "with", case.architecture),
        (case.recipe, "on", case.layout),
        *((case.architecture, "through", each) for each in through),
        *((case.recipe, case.part, *sorted(both)) for both in combinations(through, 2)),
    }


@cache
def chosen() -> frozenset[str]:
    """Names of the cases that `make layouts` trains: always the one that adds most for its number of ranks."""
    left = {case.name: meetings(case) for case in cases() if not case.slow}
    ranks = {case.name: case.ranks for case in cases()}
    names: set[str] = set()
    met: set[tuple[str, ...]] = set()
    queue = [(-len(each) / ranks[name] ** 0.5, place, name) for place, (name, each) in enumerate(left.items())]
    heapq.heapify(queue)
    while queue:
        old, place, name = heapq.heappop(queue)
        now = -len(left[name] - met) / ranks[name] ** 0.5  # what a case adds only shrinks
        if now == 0:
            continue
        if now > old:
            heapq.heappush(queue, (now, place, name))
            continue
        names.add(name)
        met |= left[name]
    return frozenset(names)


def parameters(name: str) -> list:
    """The cases of one part of the matrix. The other cases are slow."""
    return [
        pytest.param(case, id=case.name, marks=[] if case.name in chosen() else [pytest.mark.slow])
        for case in part(name)
    ]
