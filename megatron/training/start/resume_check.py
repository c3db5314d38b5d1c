"""A checkpoint with a proof that it was read as it was written: `checkpoint.prove`.

Each checkpoint has the loss of its weights on the batch of the last step before it, as the engine computed it when
saving. A resuming run computes it again, from the weights and the data that it has read. Checksums detect a changed
bit in a file. This detects everything between the file and the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from megatron.checkpoint import Checkpoint, Meta
from megatron.config import Config
from megatron.data.loader import Loader
from megatron.engine.protocol import Engine
from megatron.report.ledger import hash_text
from megatron.worker.place import StartError

from ..exchange import Exchange, joined
from ..world import World

# Largest relative difference of a loss between layouts or machines, by compute type. Tests of resumes on other layouts
# allow a tenth of it in fp32 after two steps, and half of it in bf16.
BOUNDS = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}
KEY = "proof"
Contents = Callable[[int], tuple[Any, Meta]]


def measure(config: Config, world: World, engine: Engine, loader: Loader, completed: int) -> dict[str, Any]:
    """The proof of a checkpoint after this number of updates. All ranks call it.

    Returns:
        step of the batch, its hash and its loss in nats, and the conditions under which the loss is equal to the
            last bit.
    """
    step, exchange = completed - 1, Exchange(world.mesh, world.device)
    batch = loader.read(step)
    loss, weight = engine.evaluate(batch)
    sums = exchange.sum([loss, weight, *exchange.limbs(batch.hash)]).tolist()
    return {
        "step": step,
        "batch_hash": hash_text(joined(sums[2:])),
        "loss": sums[0] / sums[1] if sums[1] else None,
        "exact": {
            "layout": world.mesh.layout.sizes,
            "micro_batch_size": config.training.micro_batch_size,
            "precision": config.precision.compute,
            "device": torch.cuda.get_device_name()
            if world.device.type == "cuda"
            else torch.backends.cpu.get_cpu_capability(),
            "torch": torch.__version__,
        },
    }


def with_proof(contents: Contents, config: Config, world: World, engine: Engine, loader: Loader) -> Contents:
    """Contents of the checkpoint hook, with the proof added."""

    def at(step: int) -> tuple[Any, Meta]:
        proof = measure(config, world, engine, loader, step) if step else None
        fragments, meta = contents(step)
        return fragments, replace(meta, extra={**meta.extra, KEY: proof}) if proof else meta

    return at


def check_loss(
    checkpoint: Checkpoint, config: Config, world: World, engine: Engine, loader: Loader, log: Callable[[str], Any]
) -> dict[str, Any]:
    """Compute the loss again, after the checkpoint was read and skipped batches are known. All ranks call it.

    Returns:
        facts for the ledger, empty for a checkpoint without a proof.

    Raises:
        StartError: on every rank, if the loss or the batch differs.
    """
    told = checkpoint.meta.extra.get(KEY)
    if told is None or told["loss"] is None:
        log(f"checkpoint.prove: {checkpoint.title} was saved without a proof, so nothing is compared")
        return {}
    now = measure(config, world, engine, loader, checkpoint.step)
    if now["batch_hash"] != told["batch_hash"]:
        raise StartError(
            f"checkpoint.prove: batch {told['step']} is another one than when {checkpoint.title} was saved "
            f"({told['batch_hash']}, now {now['batch_hash']}): data.*, the files or the batch size have changed. If "
            "that is meant, resume with checkpoint.prove=false"
        )
    exact = now["exact"] == told["exact"]
    gap = abs(now["loss"] - told["loss"]) / max(abs(told["loss"]), 1e-12)
    allowed = 0.0 if exact else BOUNDS[config.precision.compute]
    if not gap <= allowed:
        why = "" if exact else f", and {allowed:g} is allowed on another layout or machine"
        raise StartError(
            f"checkpoint.prove: the weights of {checkpoint.title} had a loss of {told['loss']!r} on batch "
            f"{told['step']} when they were saved, and have {now['loss']!r} now (relative difference {gap:.2g}{why}). "
            "Something between the files and the forward pass differs: the code, a kernel that does not repeat itself "
            "(training.deterministic), a device. Nothing was trained"
        )
    how = "equal to the last bit" if exact else f"equal within {gap:.1e}"
    log(f"checkpoint.prove: the loss on batch {told['step']} is {how}")
    return {KEY: {"step": told["step"], "loss": now["loss"], "exact": exact, "difference": gap}}
