"""A checkpoint in the format that DeepSpeed's own engine saves, for exchange with programs that are built on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from megatron.checkpoint import CheckpointError
from megatron.checkpoint.save.store import Store
from megatron.config import Config
from megatron.config.variants import used_kinds
from megatron.engine.engine import build_engine
from megatron.engine.optimizers.matrix import keeps_owner_states
from megatron.engine.optimizers.named import optimizer_class

from ..world import World
from .fetch import local_path
from .resume import resume

NAMES = "names.yml"


def write_native(config: Config, world: World, log: Callable[[str], None]) -> Path:
    """Build the run's engine, fill it from the checkpoint that `checkpoint.resume` means, and let it save itself.

    Writes `<run.dir>/deepspeed/global_step<n>` and beside it `names.yml`, the tensors' names here and there, which
    `deepy checkpoint from-deepspeed --names` reads.

    Raises:
        CheckpointError: there is no checkpoint, one of that step is there already, or the layout or the model is none
            of
            which native files tell enough.
    """
    layout, target = world.mesh.layout, Path(config.run.dir) / "deepspeed"
    if layout.tensor > 1 or layout.pipeline > 1 or layout.zero_stage == 0:
        raise CheckpointError(
            target,
            f"native files of layout {layout} do not say how tensors are cut, or have no fp32 "
            "masters; use parallel.tensor=1 parallel.pipeline=1 zero.stage=1, or to_deepspeed.py",
        )
    if keeps_owner_states(config):
        raise CheckpointError(
            target,
            f"native files of DeepSpeed have no place for the states that {config.optimizer.type} keeps of whole "
            "matrices; take the weights by to_hf.py",
        )
    if hasattr(optimizer_class(config), "evaluation_weights"):
        raise CheckpointError(
            target,
            f"native files of DeepSpeed would have the weights at which {config.optimizer.type} takes gradients, not "
            "those that it evaluates; use to_deepspeed.py, or take the weights by to_hf.py",
        )
    if layout.shares_rows:
        raise CheckpointError(
            target,
            "native files of DeepSpeed do not say whose rows of a matrix they have; use parallel.folded=1, or "
            "to_deepspeed.py",
        )
    if layout.spreads_experts:
        raise CheckpointError(
            target,
            "native files of DeepSpeed have experts that are spread in modules of its own; use "
            "parallel.expert=1, or to_deepspeed.py",
        )
    if any(kind.keeps_buffers(options) for _, kind, options in used_kinds(config.model)):
        raise CheckpointError(
            target,
            "native files have what DeepSpeed's optimizer and module know, and the routers' corrections "
            "are neither; use to_deepspeed.py, which keeps them",
        )
    store, how = Store(config.checkpoint.dir, world.communicator), config.checkpoint.resume
    found = store.resume(how if how in ("auto", "none") else local_path(how, store.directory, world.communicator))
    if found.checkpoint is None:
        raise CheckpointError(store.directory, f"nothing to write: {found.reason}")
    tag = f"global_step{found.checkpoint.step}"
    if world.communicator.broadcast((target / tag).exists()):
        raise CheckpointError(target / tag, "it exists already")
    log(found.reason)
    engine = build_engine(config, world.mesh, world.device, values=False)
    resume(found.checkpoint, world, engine)
    names = engine.save_native(target, tag, found.checkpoint.step)
    if world.is_main:
        (target / NAMES).write_text(json.dumps(names, indent=1), encoding="utf-8")
    log(f"wrote {target / tag}")
    return target / tag
