"""Ownership of fragments in a layout, without a run.

A checkpoint has no layout, so this only decides how files are cut. It follows a run's choice. Tensors go to pipeline
stages in order, and tensor parallel ranks have their shards. With ZeRO, the optimizer's states of a rank's shards are
laid end to end and cut into equal pieces for the data parallel ranks. Spread experts and shared rows of matrices go to
their ranks, and are cut over the ranks with the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from math import prod

import torch

from ...parallel.layout.layout import Coordinates, Layout
from ...parallel.layout.shard import LogicalTensor, Role
from ..format.errors import CheckpointError
from ..format.fragment import WEIGHT, FragmentSpec

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
        stored: (tensor name, state) -> type, of all that is written.
        tensors: the logical tensors by name, in the model's order.
    """
    states: dict[str, list[tuple[str, torch.dtype]]] = {}
    for (name, state), dtype in stored.items():
        states.setdefault(name, []).append((state, dtype))
    items: list[list[Item]] = [[] for _ in range(layout.world_size)]
    by_stage = stages(list(tensors.values()), layout.pipeline)
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        spread = [tensor for tensor in by_stage[at.pipeline] if _is_spread(tensor, layout)]
        others = [
            tensor
            for tensor in by_stage[at.pipeline]
            if not _is_spread(tensor, layout) and (tensor.shard is not None or at.tensor == 0)
        ]
        group = layout.expert_place(at) // layout.expert
        for mine, owner, owners in ((others, layout.replica(at), layout.replicas), (spread, group, layout.expert_data)):
            kinds = sorted({kind for tensor in mine for kind in states.get(tensor.name, ())}, key=str)
            for state, dtype in kinds:
                shards = [
                    _shard(tensor, state, layout, at)
                    for tensor in mine
                    if (state, dtype) in states.get(tensor.name, ())
                ]
                split = layout.zero_stage == 3 or (layout.zero_stage > 0 and state != WEIGHT)
                items[rank] += [(spec, dtype) for spec in _share(shards, owner, owners if split else 1)]
    return items


def _is_spread(tensor: LogicalTensor, layout: Layout) -> bool:
    """Whether each rank has a range of the first dimension: of experts, or of a matrix's rows that are divisible.

    In a run a few small matrices of recurrent mixers stay whole. Their tensors look like others, so here they are cut.
    """
    if layout.shares_rows and len(tensor.shape) == 2:
        is_matrix = tensor.matrices is not None or tensor.role in (Role.EMBEDDING, Role.HEAD)
        return is_matrix and tensor.shape[0] % layout.expert == 0
    return layout.spreads_experts and tensor.stacked


def _shard(tensor: LogicalTensor, state: str, layout: Layout, at: Coordinates) -> FragmentSpec:
    """The rank's shard of the tensor. Of spread experts, its range of them (or of its slices of them)."""
    if not _is_spread(tensor, layout):
        return FragmentSpec.whole(tensor, state, at.tensor, layout.tensor)
    count, left = divmod(tensor.shape[0], layout.expert)
    if left:
        raise CheckpointError(tensor.name, f"its {tensor.shape[0]} experts must be divisible by {layout.expert} ranks")
    whole = FragmentSpec.whole(tensor, state, *((0, 1) if layout.folded else (at.tensor, layout.tensor)))
    size = whole.length // tensor.shape[0] * count
    return whole.part(layout.expert_place(at) % layout.expert * size, size)


def _share(shards: list[FragmentSpec], owner: int, owners: int) -> Iterable[FragmentSpec]:
    """One owner's piece of the shards laid end to end. Ranks beyond `owners` hold copies and get nothing."""
    total = sum(shard.length for shard in shards)
    if owner >= owners:
        return
    piece = -(-total // owners)
    low, high, place = owner * piece, min(total, (owner + 1) * piece), 0
    for shard in shards:
        first, last = max(low, place), min(high, place + shard.length)
        if first < last:
            yield shard.part(first - place, last - first)
        place += shard.length
