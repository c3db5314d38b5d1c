"""Who would own what: the fragments of a layout, without a run.

A checkpoint has no layout, so this is only a choice of how its files are cut. It follows a run's own: tensors fall
to pipeline stages in their order, tensor parallel ranks have their shards, and with ZeRO what the optimizer needs of
a rank's shards, laid end to end, falls to the data parallel ranks in equal pieces.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from math import prod

import torch

from ..parallel.layout import Layout
from ..parallel.shard import LogicalTensor
from .fragment import WEIGHT, FragmentSpec

Item = tuple[FragmentSpec, torch.dtype]


def stages(tensors: list[LogicalTensor], count: int) -> list[list[LogicalTensor]]:
    """The tensors, in order, in `count` groups of about the same number of elements."""
    sizes = [prod(tensor.shape) for tensor in tensors]
    total = max(1, sum(sizes))
    groups: list[list[LogicalTensor]] = [[] for _ in range(count)]
    for tensor, size, end in zip(tensors, sizes, accumulate(sizes), strict=True):
        middle = 2 * end - size
        groups[min(count - 1, middle * count // (2 * total))].append(tensor)
    return groups


def owned(
    layout: Layout, stored: dict[tuple[str, str], torch.dtype], tensors: dict[str, LogicalTensor]
) -> list[list[Item]]:
    """For each rank of a layout, the fragments it would write, with their types.

    Args:
        stored: (tensor name, state) -> type, of all that is to be written.
        tensors: the logical tensors by name, in the model's order.
    """
    states: dict[str, list[tuple[str, torch.dtype]]] = {}
    for (name, state), dtype in stored.items():
        states.setdefault(name, []).append((state, dtype))
    items: list[list[Item]] = [[] for _ in range(layout.world_size)]
    by_stage = stages(list(tensors.values()), layout.pipeline)
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        mine = [tensor for tensor in by_stage[at.pipeline] if tensor.shard is not None or at.tensor == 0]
        kinds = sorted({kind for tensor in mine for kind in states.get(tensor.name, ())}, key=str)
        for state, dtype in kinds:
            shards = [
                FragmentSpec.whole(tensor, state, at.tensor, layout.tensor)
                for tensor in mine if (state, dtype) in states.get(tensor.name, ())
            ]
            items[rank] += [(spec, dtype) for spec in _share(shards, state, layout, at.data)]
    return items


def _share(shards: list[FragmentSpec], state: str, layout: Layout, data_rank: int) -> Iterable[FragmentSpec]:
    """What one data parallel rank has of the shards laid end to end."""
    split = layout.zero_stage == 3 or (layout.zero_stage > 0 and state != WEIGHT)
    total = sum(shard.length for shard in shards)
    ranks = layout.data if split else 1
    if data_rank >= ranks:
        return
    piece = -(-total // ranks)
    low, high, place = data_rank * piece, min(total, (data_rank + 1) * piece), 0
    for shard in shards:
        first, last = max(low, place), min(high, place + shard.length)
        if first < last:
            yield shard.part(first - place, last - first)
        place += shard.length
