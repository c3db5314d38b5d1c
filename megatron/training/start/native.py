"""A checkpoint in the format of DeepSpeed's own engine, for exchange with programs built on it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron.checkpoint import CheckpointError
from megatron.checkpoint.save.store import Store
from megatron.config import Config
from megatron.config.features.feature import for_reading
from megatron.config.variants import used_kinds
from megatron.engine.engine import build_engine
from megatron.engine.optimizers.contract import optimizer_class
from megatron.engine.optimizers.matrix import keeps_owner_states
from megatron.parallel.layout.layout import Layout

from ..world import World
from .fetch import local_path
from .resume import resume

NAMES = "names.yml"


def _limits(config: Config, layout: Layout) -> Iterator[tuple[bool, str]]:
    """(whether it applies, limit of the format and fix)"""
    optimizer = config.optimizer.type
    yield (
        layout.tensor > 1 or layout.pipeline > 1 or layout.zero_stage == 0,
        f"of layout {layout} do not say how tensors are cut, or have no fp32 masters. Use parallel.tensor=1 "
        "parallel.columns=1 parallel.pipeline=1 zero.stage=1, or to_deepspeed.py",
    )
    yield (
        keeps_owner_states(config),
        f"cannot have the states that {optimizer} keeps of whole matrices. Take the weights by to_hf.py",
    )
    yield (
        hasattr(optimizer_class(config), "evaluation_weights"),
        f"would have the weights at which {optimizer} takes gradients, not its evaluation weights. Use "
        "to_deepspeed.py, or take the weights by to_hf.py",
    )
    for name, applies in (("folded", layout.shares_rows), ("depth", layout.depth > 1)):
        rows = f"do not say whose rows of a matrix they have. Use parallel.{name}=1, or to_deepspeed.py"
        yield applies, rows
    experts = "have experts that are spread in modules of its own. Use parallel.expert=1, or to_deepspeed.py"
    yield layout.spreads_experts, experts
    yield (
        config.model.residual.block_scale
        or any(kind.keeps_buffers(options) for _, kind, options in used_kinds(config.model)),
        "only have tensors of its optimizer and module, without the routers' corrections and tables and the blocks' "
        "scales. Use to_deepspeed.py, which keeps them",
    )


def write_native(config: Config, world: World, log: Callable[[str], None]) -> Path:
    """Build the run's engine, fill it from the checkpoint of `checkpoint.resume`, and have DeepSpeed save it.

    Writes `<run.dir>/deepspeed/global_step<n>` and next to it `names.yml`, the tensors' names here and there, which
    `deepy checkpoint from-deepspeed --names` reads.

    Raises:
        CheckpointError: there is no checkpoint, one of that step exists already, or native files cannot represent
            the layout or the model.
    """
    target = Path(config.run.dir) / "deepspeed"
    for impossible, text in _limits(config, world.mesh.layout):
        if impossible:
            raise CheckpointError(target, f"native files of DeepSpeed {text}")
    store, how = Store(config.checkpoint.dir, world.communicator), config.checkpoint.resume
    found = store.resume(how if how in ("auto", "none") else local_path(how, store.directory, world.communicator))
    if found.checkpoint is None:
        raise CheckpointError(store.directory, f"nothing to write: {found.reason}")
    tag = f"global_step{found.checkpoint.step}"
    if world.communicator.broadcast((target / tag).exists()):
        raise CheckpointError(target / tag, "it exists already")
    log(found.reason)
    engine = build_engine(for_reading(config), world.mesh, world.device, values=False)
    resume(found.checkpoint, world, engine)
    names = engine.save_native(target, tag, found.checkpoint.step)
    if world.is_main:
        (target / NAMES).write_text(json.dumps(names, indent=1), encoding="utf-8")
    log(f"wrote {target / tag}")
    return target / tag
