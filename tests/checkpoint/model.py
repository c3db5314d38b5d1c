"""A model that is only a list of logical tensors with values, and layouts that cut it element by element."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from megatron.checkpoint import Fragment, Meta
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.shard import LogicalTensor, Role, Shard
from tests.checkpoint.brute import local_shard

HIDDEN, VOCABULARY, LAYERS = 12, 37, 3


def tensors(tied: bool = False) -> list[LogicalTensor]:
    """A few layers with every kind of cut: rows, columns, fused parts, whole heads, experts, and none."""
    found = [LogicalTensor("embedding.weight", (VOCABULARY, HIDDEN), Role.EMBEDDING, Shard(0))]
    for layer in range(LAYERS):
        at = f"layers.{layer}"
        found += [
            LogicalTensor(f"{at}.norm.weight", (HIDDEN,), Role.NORM),
            LogicalTensor(f"{at}.attention.qkv.weight", (20, HIDDEN), Role.HIDDEN, Shard(0, (12, 4, 4), 2)),
            LogicalTensor(f"{at}.attention.out.weight", (HIDDEN, 12), Role.OUTPUT, Shard(1, None, 2), matrices=(12,)),
            LogicalTensor(f"{at}.mlp.gate_up.weight", (22, HIDDEN), Role.HIDDEN, Shard(0, (11, 11)), matrices=(11, 11)),
            LogicalTensor(f"{at}.mlp.down.weight", (HIDDEN, 11), Role.OUTPUT, Shard(1)),
            LogicalTensor(f"{at}.mlp.gate_up.bias", (22,), Role.BIAS, Shard(0, (11, 11))),
            LogicalTensor(f"{at}.experts.weight", (3, 7, 5), Role.HIDDEN, Shard(1)),
            LogicalTensor(f"{at}.mixer.decay", (9,), Role.STATE, Shard(0), keep_fp32=True),
            LogicalTensor(f"{at}.scale", (), Role.STATE, keep_fp32=True),
        ]
    found.append(LogicalTensor("norm.weight", (HIDDEN,), Role.NORM))
    return found if tied else [*found, LogicalTensor("head.weight", (VOCABULARY, HIDDEN), Role.HEAD, Shard(0))]


@dataclass
class Model:
    """Values of every state of every tensor. A function of the seed.

    Args:
        optimizer: "adamw" or "muon" (a momentum for matrices, AdamW's two moments for the rest).
    """

    seed: int = 0
    tied: bool = False
    optimizer: str = "adamw"
    dtype: torch.dtype = torch.bfloat16
    values: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tensors = tensors(self.tied)
        generator = torch.Generator().manual_seed(self.seed)
        for tensor in self.tensors:
            master = torch.randn(tensor.shape, generator=generator)
            self.values[tensor.name, "master"] = master
            self.values[tensor.name, "weight"] = master if tensor.keep_fp32 else master.to(self.dtype)
            muon = self.optimizer == "muon" and len(tensor.shape) == 2 and tensor.role in (Role.HIDDEN, Role.OUTPUT)
            for state in ("momentum_buffer",) if muon else ("exp_avg", "exp_avg_sq"):
                self.values[tensor.name, state] = torch.randn(tensor.shape, generator=generator)

    def states(self, name: str) -> list[str]:
        return [state for other, state in self.values if other == name]

    def shard(self, tensor: LogicalTensor, state: str, rank: int, ranks: int) -> torch.Tensor:
        """The flattened local shard, picked element by element."""
        numbers = np.arange(int(np.prod(tensor.shape))).reshape(tensor.shape)
        return self.values[tensor.name, state].reshape(-1)[torch.from_numpy(local_shard(numbers, tensor, rank, ranks))]


def stage_of(tensor: LogicalTensor, count: int) -> int:
    """Uneven stages: the first has only the embedding and perhaps a layer, the last what is left."""
    if tensor.name.startswith("embedding"):
        return 0
    if tensor.name.startswith("layers."):
        return min(count - 1, int(tensor.name.split(".")[1]) * count // LAYERS)
    return count - 1


def fragments(model: Model, layout: Layout, rank: int, *, replicas: bool = False) -> list[Fragment]:
    """The state of a rank: with ZeRO the states of its shards lie end to end and are cut at odd places.

    Args:
        replicas: everything the rank needs to run, not only what it is the owner of.
    """
    at = layout.coordinates(rank)
    found = []
    mine = [tensor for tensor in model.tensors if stage_of(tensor, layout.pipeline) == at.pipeline]
    for state in sorted({state for _, state in model.values}):
        place = 0
        shards = [
            (tensor, model.shard(tensor, state, at.tensor, layout.tensor))
            for tensor in mine
            if (tensor.name, state) in model.values and (replicas or tensor.shard is not None or at.tensor == 0)
        ]
        total = sum(len(values) for _, values in shards)
        split = layout.zero_stage == 3 or (layout.zero_stage and state != "weight")
        if not split and at.data and not replicas:
            continue
        low, high = (total * at.data // layout.data, total * (at.data + 1) // layout.data) if split else (0, total)
        for tensor, values in shards:
            first, last = max(low - place, 0), min(high - place, len(values))
            if first <= last:  # empty ones too: a rank may own nothing of a tensor
                found.append(Fragment(tensor, state, at.tensor, layout.tensor, first, values[first:last].clone()))
            place += len(values)
    return found


def meta(step: int, **more: Any) -> Meta:
    return Meta(step=step, config="model: {hidden_size: 12}\n", data={"samples": step * 8}, **more)


class Together:
    """Communicators of ranks that are threads of this process."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._values: list[Any] = [None] * size
        self.members = [_Member(self, rank, size) for rank in range(size)]

    def run(self, work: Callable[..., Any]) -> list[Any]:
        """`work(communicator)` on every rank. Returns results or exceptions in rank order."""
        results: list[Any] = [None] * len(self.members)

        def one(member: _Member) -> None:
            try:
                results[member.rank] = work(member)
            except Exception as error:
                results[member.rank] = error

        threads = [threading.Thread(target=one, args=(member,)) for member in self.members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


class _Member:
    def __init__(self, together: Together, rank: int, size: int) -> None:
        self._together, self.rank, self.size = together, rank, size

    def barrier(self) -> None:
        self._together._barrier.wait()

    def gather(self, value: Any) -> list[Any]:
        self._together._values[self.rank] = value
        self.barrier()
        values = list(self._together._values)
        self.barrier()
        return values

    def collect(self, value: Any) -> list[Any] | None:
        values = self.gather(value)
        return values if self.rank == 0 else None

    def broadcast(self, value: Any) -> Any:
        return self.gather(value)[0]

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        return [any(each) for each in zip(*self.gather(list(flags)), strict=True)]
