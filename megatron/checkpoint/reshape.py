"""Rewrite a checkpoint in the fragments of another layout. Only the shape of its files changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..parallel.layout.layout import Layout
from .format.durable import write_file
from .format.errors import CheckpointError
from .format.fragment import FragmentSpec
from .format.names import wrong_name
from .format.rankfile import FileRecord, write_rank_file
from .read.logical import TensorStream
from .read.ownership import owned
from .read.reader import Checkpoint, open_checkpoint
from .save.writer import Draft

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
    layout = Layout(**sizes)
    if min(layout.tensor, layout.context, layout.data, layout.pipeline, layout.expert, rows) < 1:
        raise ValueError(f"--to {text}: sizes must be at least 1")
    if layout.zero_stage > 3:
        raise ValueError(f"--to {text}: the ZeRO stage must be 0 to 3")
    if layout.shares_rows and layout.tensor > 1:
        raise ValueError(f"--to {text}: tensor must be 1 where ranks share rows (folded)")
    if slices not in (1, layout.tensor):
        raise ValueError(f"--to {text}: expert_tensor must be 1 (folded) or equal tensor={layout.tensor}")
    if layout.expert_line % layout.expert:
        raise ValueError(
            f"--to {text}: {layout.expert_line} ranks cannot be cut into groups of {layout.expert} for the experts"
        )
    if layout.spreads_experts and layout.zero_stage == 3:
        raise ValueError(
            f"--to {text}: with ZeRO 3 expert and folded must be 1, since every tensor is cut over all data ranks"
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
    records: list[FileRecord] = []
    failure = None
    try:
        with TensorStream(source) as stream:
            for rank, items in enumerate(owned(layout, source.stored, source.tensors)):
                progress(f"rank {rank} of {layout.world_size}")
                record = write_rank_file(draft.root, rank, items, _reader(stream, items))
                records += [record] if record else []
    except (OSError, ValueError, CheckpointError) as error:
        failure = error
    draft.finish(records, failure, replace(source.meta, layout=layout.sizes))
    return _compare(source, target, progress) if verify else {}


def _reader(
    stream: TensorStream, items: Sequence[tuple[FragmentSpec, torch.dtype]]
) -> Callable[[int], Iterable[torch.Tensor]]:
    return lambda number: stream.values(items[number][0])


def _compare(source: Checkpoint, target: Path, progress: Callable[[str], None]) -> dict:
    result = open_checkpoint(target, verify="checksums")
    sums: dict[str, dict[str, dict[str, str]]] = {}
    with TensorStream(source) as before, TensorStream(result) as after:
        for name, state in source.stored:
            progress(f"verifying {name} ({state})")
            both = {"before": before.sha256(name, state), "after": after.sha256(name, state)}
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
