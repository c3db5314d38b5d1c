"""Whole training runs on ranks without a launcher: what train.py does, for tests of optimizers, schedules and hooks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .ranks import PATIENCE, on_ranks

if TYPE_CHECKING:
    from megatron.config.resolution import Resolved


def train_on_ranks(ranks: int, values: Mapping[str, Any], overrides: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Train, or continue from the last checkpoint of `checkpoint.dir`. Return the records of the run's metrics.jsonl.

    Args:
        values: a configuration as a nested dictionary, with `run.dir`.
        overrides: further `key.path=value`, as on the command line.

    Raises:
        RuntimeError: with the traceback of the first rank that failed.
    """
    return on_ranks(ranks, train_on_this_rank, dict(values), list(overrides), ranks)[0]


def train_on_this_rank(values: dict[str, Any], overrides: list[str], ranks: int) -> list[dict[str, Any]]:
    """One rank's part in an existing process group. Rank 0 returns the records."""
    from megatron.config import load

    return run_on_this_rank(load([], [*_words(values), *overrides], ranks=ranks), ranks)


def run_on_this_rank(resolved: Resolved, ranks: int, attempt: int = 0) -> list[dict[str, Any]]:
    """The same for a resolved configuration. `attempt` counts earlier starts of the job."""
    import torch
    import torch.distributed as dist

    from megatron.checkpoint import SOLO, GroupCommunicator
    from megatron.config import to_yaml
    from megatron.engine.deepspeed.process import prepare_deepspeed
    from megatron.parallel.layout.layout import Layout
    from megatron.parallel.layout.mesh import Mesh
    from megatron.training.run import run_training
    from megatron.training.world import World
    from megatron.worker.place import WorkerEnvironment

    prepare_deepspeed(torch.device("cpu"))
    mesh = Mesh.build(Layout.of(resolved.config, ranks), PATIENCE)
    talk = GroupCommunicator() if ranks > 1 else SOLO
    write = GroupCommunicator(dist.new_group(backend="gloo", timeout=PATIENCE)) if ranks > 1 else SOLO
    place = WorkerEnvironment(rank=mesh.rank, world_size=ranks, config_text=to_yaml(resolved), attempt=attempt)
    run_training(resolved.config, place, World(torch.device("cpu"), mesh, talk, write))
    if mesh.rank:
        return []
    return [json.loads(line) for line in (Path(resolved.config.run.dir) / "metrics.jsonl").read_text().splitlines()]


def _words(values: Mapping[str, Any]) -> list[str]:
    return [f"{section}={json.dumps(value)}" for section, value in values.items()]
