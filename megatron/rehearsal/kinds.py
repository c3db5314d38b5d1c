"""Kinds of ranks, by their work. One of each kind is rehearsed."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config import Config
from megatron.config.variants import used_kinds
from megatron.model.partition import stage_bounds
from megatron.parallel.layout.layout import Coordinates, Layout


@dataclass(frozen=True)
class StagePart:
    """Layers of a pipeline stage.

    Attributes:
        embedding, head: whether the stage has them.
    """

    stage: int  # from 0
    blocks: tuple[int, int]  # numbers of the first block and of the one after the last
    embedding: bool
    head: bool

    def __str__(self) -> str:
        first, end = self.blocks
        held = ["embedding"] if self.embedding else []
        held.append(f"block {first}" if end - first == 1 else f"blocks {first}-{end - 1}")
        return ", ".join([*held, *(["head"] if self.head else [])])


def parts(config: Config) -> list[StagePart]:
    """The layers of all stages, in order."""
    bounds, blocks = stage_bounds(config), len(config.model.blocks)
    return [
        StagePart(stage, (max(first - 1, 0), min(end - 1, blocks)), first == 0, end == blocks + 2)
        for stage, (first, end) in enumerate(zip(bounds, bounds[1:]))
    ]


def hands_states_on(config: Config) -> bool:
    """Whether ranks continue from states whose form only the previous rank knows (`model/relay.py`). Then only ranks
    that begin their sequences can be rehearsed."""
    return any(kind.context == "states" for _, kind, _ in used_kinds(config.model))


def kinds_of_ranks(config: Config, layout: Layout) -> list[int]:
    """One rank of each kind: the first of all stages with the same layers, which keeps most micro-batches, and the last
    stage. Ranks of the tensor and data axes do the same work, and the first has the largest shares. Of ranks that share
    sequences the first two, one from the middle and the last are chosen, since they exchange different tensors.
    """
    found: dict[tuple, int] = {}
    for part in parts(config):
        layers = tuple(map(str, config.model.blocks[slice(*part.blocks)]))
        found.setdefault((layers, part.embedding, part.head), part.stage)
    ranks = layout.context
    places = {0} if hands_states_on(config) else {0, 1 % ranks, ranks // 2, ranks - 1}
    return [
        layout.rank(Coordinates(pipeline=stage, context=context))
        for stage in sorted(found.values())
        for context in sorted(places)
    ]
