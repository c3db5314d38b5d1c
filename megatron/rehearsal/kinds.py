"""Kinds of ranks, by their work. One of each kind is rehearsed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from megatron.config import Config
from megatron.config.variants import used_kinds
from megatron.model.partition import rank_of
from megatron.parallel.layout.layout import Coordinates, Layout


@dataclass(frozen=True)
class StagePart:
    """Layers of a pipeline rank.

    Attributes:
        embedding, head: whether the rank has them.
    """

    rank: int  # from 0
    blocks: tuple[int, ...]
    embedding: bool
    head: bool

    def __str__(self) -> str:
        held = ["embedding"] if self.embedding else []
        for _, run in groupby(enumerate(self.blocks), key=lambda pair: pair[1] - pair[0]):
            first, *others = (block for _, block in run)
            held.append(f"blocks {first}-{others[-1]}" if others else f"block {first}")
        return ", ".join([*held, *(["head"] if self.head else [])])


def parts(config: Config) -> list[StagePart]:
    """The layers of all ranks of the pipeline, in order."""
    first, *at, last = rank_of(config)
    return [
        StagePart(rank, tuple(block for block, here in enumerate(at) if here == rank), rank == first, rank == last)
        for rank in range(config.parallel.pipeline)
    ]


def hands_states_on(config: Config) -> bool:
    """Whether ranks continue from states whose form only the previous rank knows (`model/relay.py`). Then only ranks
    that begin their sequences can be rehearsed."""
    return any(kind.context == "states" for _, kind, _ in used_kinds(config.model))


def kinds_of_ranks(config: Config, layout: Layout) -> list[int]:
    """One rank of each kind: the first of all pipeline ranks with the same layers, which keeps most micro-batches, and
    the last one. Ranks of the tensor and data axes do the same work, and the first has the largest shares. Of ranks
    that share sequences the first two, one from the middle and the last are chosen, since they exchange different
    tensors.
    """
    found: dict[tuple, int] = {}
    for part in parts(config):
        layers = tuple(str(config.model.blocks[block]) for block in part.blocks)
        found.setdefault((layers, part.embedding, part.head), part.rank)
    ranks = layout.context
    places = {0} if hands_states_on(config) else {0, 1 % ranks, ranks // 2, ranks - 1}
    return [
        layout.rank(Coordinates(pipeline=stage, context=context))
        for stage in sorted(found.values())
        for context in sorted(places)
    ]
