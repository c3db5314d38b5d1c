"""Rewrite a checkpoint in the fragments of another layout. Only the shape of its files changes.

A checkpoint has no layout, so a layout only decides how files are cut. It follows a run's choice. Tensors go to
pipeline stages in order, and tensor parallel ranks have their shards. With ZeRO, the optimizer's states of a rank's
shards are laid end to end and cut into equal pieces for the data parallel ranks. Spread experts and shared rows of
matrices go to their ranks, and are cut over the ranks with the same ones."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron.parallel.layout.layout import Coordinates, Layout
from megatron.parallel.layout.shard import LogicalTensor, Role

from .format.durable import write_file, wrong_name
from .format.errors import CheckpointError
from .format.fragment import WEIGHT, FragmentSpec
from .format.rankfile import FileRecord, write_rank_file
from .read.logical import sha256, streamed
from .read.reader import Checkpoint, open_checkpoint
from .save.writer import Draft

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
    tensors = {name: replace(each, shard=each.shard and each.shard.uncrossed) for name, each in tensors.items()}
    states: dict[str, list[tuple[str, torch.dtype]]] = {}
    for (name, state), dtype in stored.items():
        states.setdefault(name, []).append((state, dtype))
    items: list[list[Item]] = [[] for _ in range(layout.world_size)]
    by_stage = stages(list(tensors.values()), layout.pipeline)
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        held = [tensor for tensor in by_stage[at.pipeline] if tensor.shard is not None or at.tensor == 0]
        spread = [tensor for tensor in held if _is_spread(tensor, layout)]
        others = [tensor for tensor in held if not _is_spread(tensor, layout)]
        group = layout.expert_place(at) // layout.expert
        for mine, owner, owners in ((others, layout.replica(at), layout.replicas), (spread, group, layout.expert_data)):
            kinds = sorted({kind for tensor in mine for kind in states.get(tensor.name, ())}, key=str)
            for state, dtype in kinds:
                shards = [_shard(t, state, layout, at) for t in mine if (state, dtype) in states.get(t.name, ())]
                split = layout.zero_stage == 3 or (layout.zero_stage > 0 and state != WEIGHT)
                items[rank] += [(spec, dtype) for spec in _share(shards, owner, owners if split else 1)]
    return items


def _is_spread(tensor: LogicalTensor, layout: Layout) -> bool:
    """Whether each rank has a range of the first dimension: of experts, or of a matrix's rows that are divisible.

    In a run a few small matrices of recurrent mixers stay whole. Their tensors look like others, so here they are cut.
    """
    if (layout.shares_rows or layout.depth > 1) and len(tensor.shape) == 2:
        is_table = layout.shares_rows and tensor.role in (Role.EMBEDDING, Role.HEAD)
        held = (tensor.local_shape(rank, layout.tensor)[0] for rank in range(layout.tensor))
        return (tensor.matrices is not None or is_table) and not any(rows % layout.expert for rows in held)
    return layout.spreads_experts and tensor.stacked


def _shard(tensor: LogicalTensor, state: str, layout: Layout, at: Coordinates) -> FragmentSpec:
    """The rank's shard of the tensor. Of spread experts, its range of them (or of its slices of them)."""
    if not _is_spread(tensor, layout):
        return FragmentSpec.whole(tensor, state, at.tensor, layout.tensor)
    if tensor.stacked and tensor.shape[0] % layout.expert:
        raise CheckpointError(tensor.name, f"its {tensor.shape[0]} experts must be divisible by {layout.expert} ranks")
    whole = FragmentSpec.whole(tensor, state, *((0, 1) if layout.folded else (at.tensor, layout.tensor)))
    size = whole.length // layout.expert
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


VERIFY_NAME = "sha256.json"
KEYS = {
    "tensor": "tensor",
    "context": "context",
    "data": "data",
    "pipeline": "pipeline",
    "zero": "zero_stage",
    "expert": "expert",
    "expert_tensor": "expert_tensor",
    "folded": "folded",
    "depth": "depth",
}


def parse_layout(text: str) -> Layout:
    """Parse `tensor=4,pipeline=2,data=2,zero=1`. Omitted keys are 1 (ZeRO: 0, expert_tensor: tensor).

    Raises:
        ValueError: an unknown key, a value out of range, or sizes of experts that do not divide the ranks.
    """
    values = {}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key not in KEYS or not value.isdigit():
            raise ValueError(f"--to {text}: {item!r} is not one of {', '.join(f'{known}=N' for known in KEYS)}")
        values[KEYS[key]] = int(value)
    slices, rows = values.pop("expert_tensor", values.get("tensor", 1)), values.pop("folded", 1)
    sizes: dict[str, Any] = values | {"folded": slices < values.get("tensor", 1)}
    if rows > 1:
        if not values.get("context", rows) == values.get("expert", rows) == rows:
            raise ValueError(f"--to {text}: context and expert must be omitted or equal folded={rows}")
        sizes |= {"context": rows, "expert": rows, "shares_rows": True}
    elif (depth := values.get("depth", 1)) > 1:
        if values.get("expert", depth) != depth or sizes["folded"]:
            raise ValueError(f"--to {text}: expert must be omitted or equal depth={depth}, and expert_tensor omitted")
        sizes |= {"expert": depth}
    layout = Layout(**sizes)
    if min(layout.tensor, layout.context, layout.data, layout.pipeline, layout.expert, rows, layout.depth) < 1:
        raise ValueError(f"--to {text}: sizes must be at least 1")
    if layout.zero_stage > 3:
        raise ValueError(f"--to {text}: the ZeRO stage must be 0 to 3")
    if layout.shares_rows and layout.tensor > 1:
        raise ValueError(f"--to {text}: tensor must be 1 where ranks share rows (folded)")
    if slices not in (1, layout.tensor):
        raise ValueError(f"--to {text}: expert_tensor must be 1 (folded) or equal tensor={layout.tensor}")
    if layout.expert_line % layout.expert:
        raise ValueError(f"--to {text}: {layout.expert_line} ranks cannot form groups of {layout.expert} for experts")
    if layout.spreads_experts and layout.zero_stage == 3:
        raise ValueError(
            f"--to {text}: with ZeRO 3 expert, folded and depth must be 1, where all data ranks cut every tensor"
        )
    return layout


def reshape(
    source: Checkpoint,
    target: Path,
    layout: Layout,
    *,
    verify: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, dict[str, dict[str, str]]]:
    """Write `source` as `layout` would have written it. Memory: a few chunks, for tensors of any size.

    Args:
        verify: compare the SHA-256 of every logical tensor before and after, and write them to `sha256.json` there.
        progress: called with each step of the work.

    Returns:
        {tensor: {state: {before, after}}} if `verify`, else empty.

    Raises:
        CheckpointError: the source is damaged, the target exists, or a tensor has changed.
    """
    if target.exists():
        raise CheckpointError(target, "it exists already")
    if wrong := wrong_name(target, source.step):
        raise CheckpointError(target, wrong)
    draft = Draft.begin(target)

    def write(rank: int, items: list[Item]) -> FileRecord | None:
        progress(f"rank {rank} of {layout.world_size}")
        return write_rank_file(draft.root, rank, items, lambda number: streamed(source, items[number][0]))

    def write_all() -> list[FileRecord | None]:
        return [write(*each) for each in enumerate(owned(layout, source.stored, source.tensors))]

    draft.write(write_all, replace(source.meta, layout=layout.sizes))
    return _compare(source, target, progress) if verify else {}


def _compare(source: Checkpoint, target: Path, progress: Callable[[str], None]) -> dict:
    result = open_checkpoint(target, verify="checksums")
    sums: dict[str, dict[str, dict[str, str]]] = {}
    for name, state in source.stored:
        progress(f"verifying {name} ({state})")
        both = {"before": sha256(source, name, state), "after": sha256(result, name, state)}
        sums.setdefault(name, {})[state] = both
    write_file(target / VERIFY_NAME, json.dumps(sums, indent=1).encode())
    wrong = [
        f"{name} ({state}) is not the same afterwards"
        for name, states in sums.items()
        for state, both in states.items()
        if both["before"] != both["after"]
    ]
    wrong += [f"{name} ({state}) is new" for name, state in result.stored if (name, state) not in source.stored]
    if wrong:
        raise CheckpointError(target, wrong)
    return sums
