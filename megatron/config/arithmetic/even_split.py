"""How many blocks each pipeline stage has where that depends on their number alone."""

from __future__ import annotations


def uniform_counts(blocks: int, stages: int) -> list[int]:
    """As even as can be: stages in the middle have neither embedding nor head, and take what is left over first."""
    counts = [blocks // stages] * stages
    order = [*range(1, stages - 1), 0, stages - 1] if stages > 1 else [0]
    for stage in order[: blocks % stages]:
        counts[stage] += 1
    return counts
