"""Checks whether a checkpoint belongs to the run that resumes it: changes since, and refused changes."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint import Checkpoint, CheckpointError, Meta
from megatron.config import Config
from megatron.config.features.feature import features_of
from megatron.config.sequences import stage_values
from megatron.config.source.layers import Origin
from megatron.config.source.yaml_source import parse
from megatron.data.hashing import sample_hash
from megatron.data.loader import Loader
from megatron.data.plan import SampleSet
from megatron.data.skipped_batches import LeftOut
from megatron.engine.base import BaseEngine
from megatron.engine.protocol import Engine
from megatron.report.ledger import hash_text
from megatron.worker.place import StartError

from ..exchange import Exchange, joined
from ..world import World

# Keys that do not change what is trained.
_UNREMARKABLE = (
    "run launch checkpoint logging evaluation parallel zero training.accumulation training.micro_batch_size "
    "training.loss_chunk training.stop_at_step training.stop_after data.cache data.workers data.prefetch"
).split()


def last_sample(
    plan: SampleSet, samples: int, left_out: LeftOut | None = None, length: int | None = None
) -> str | None:
    """Hash of the last of the first `samples` samples of a run, to detect another order of the data.

    Args:
        length: of its last n tokens. None: of all.
    """
    if not samples:
        return None
    tokens = plan.sample((left_out or LeftOut()).in_samples(plan.batches).batch(samples - 1)).tokens
    return hash_text(sample_hash(0, tokens if length is None else tokens[-length - 1 :]))


def data_changes(meta: Meta, config: Config, plan: SampleSet, left_out: LeftOut | None = None) -> list[str]:
    """Warnings where a resumed run does not continue in the checkpoint's data. These are a function of the
    configuration and the step, so another batch size, other files or another length of the run may move them."""
    before, now = meta.data.get("samples"), plan.batches.before(meta.step)  # of all peers, if there are several
    if before is None:
        return []
    length, longest = meta.data.get("sequence_length", config.training.sequence_length), config.training.sequence_length
    if length != longest and before * length == now * longest:  # the same tokens, in samples of another length
        before = now
    if before != now:
        return [
            f"warning: the data continue at sample {now:,} (by training.global_batch_size and batch_schedule), and the "
            f"checkpoint has read {before:,}: the samples between are " + ("skipped" if now > before else "read again")
        ]
    found = []
    if meta.data.get("document_weights", {}) != plan.document_weights():
        found.append("warning: the weights of documents (document_weights) differ from the checkpoint's")
    told = meta.data.get("last_sample")
    if told is None or meta.step > plan.steps or told == last_sample(plan, now, left_out, length):
        return found
    return [
        *found,
        "warning: the data order differs from the checkpoint's (data.*, training.steps, training.sequence_length or "
        "the files have changed). Some samples may be repeated or skipped",
    ]


def changes(before: str, config: Config, completed: int = 0, start: int | None = None) -> list[str]:
    """`key: old -> new` for each key that matters to what is trained and differs from the checkpoint's configuration.

    Lengths and rotary options are compared in the checkpoint's stage of sequence length: a run may get further stages,
    and continues as it was.

    Args:
        completed: updates of the checkpoint.
        start: updates after which this run uses it, by default the same number.
    """
    values, _, _ = parse(before, lambda _line: Origin("values"))
    now = config.model_dump(mode="json")
    schedules = [values["training"].get("sequence_schedule") or [], now["training"]["sequence_schedule"]]
    old, new = _leaves(_as_of(values, completed)), _leaves(_as_of(now, completed if start is None else start))
    for key in () if schedules[0] == schedules[1] else ("sequence_schedule", "sequence_length"):
        old[f"training.{key}"], new[f"training.{key}"] = values["training"].get(key), now["training"][key]
    keys = [k for k in sorted(old.keys() & new.keys()) if not any(f"{k}.".startswith(f"{x}.") for x in _UNREMARKABLE)]
    return [f"{key}: {old[key]!r} -> {new[key]!r}" for key in keys if old[key] != new[key]]


# Keys that identify a run: its start, and the meaning of its tokens and tensors.
_IDENTITY = ("training.seed", "tokenizer", "model")
# Keys of the model that change its training or computation, not its identity.
_RECIPE = re.compile(
    r"model\.(kernels|fused_attention|dropout|.*\blosses|.*\bjitter|.*\bcorrection_rate|.*capacity.*)(\.|$)"
)


def refuse_other_runs(subject: object, changed: list[str], config: Config) -> None:
    """Refuse to resume from a checkpoint of a run with another seed, model or tokenizer.

    Args:
        changed: see `changes`.

    Raises:
        CheckpointError: with each key that `checkpoint.allow_changes` does not name.
    """
    allowed = config.checkpoint.allow_changes
    features = features_of(tuple(config.model.extensions)).values()
    identity = (*_IDENTITY, *(key for feature in features for key in feature.identity))
    keys = []
    for line in changed:
        key = line.partition(":")[0]
        decides = any(f"{key}.".startswith(f"{each}.") for each in identity) and not _RECIPE.match(key)
        moved = key == "tokenizer.path" and _same_name(line)
        if decides and not moved and not any(f"{key}.".startswith(f"{each}.") for each in allowed):
            keys.append((key, line))
    if keys:
        names = ", ".join(key for key, _ in keys)
        raise CheckpointError(
            subject,
            [
                "it is of another run: what decides over its weights has changed",
                *(line for _, line in keys),
                "undo the change, or give this run its own run.dir (or run.name). "
                f"To continue with the change, use checkpoint.allow_changes=[{names}]",
            ],
        )


def refuse_other_shards(subject: object, before: str, config: Config) -> None:
    """Refuse to resume a run whose stream of texts has other files than the checkpoint's, which is another order.

    Raises:
        CheckpointError: with each stream, unless `checkpoint.allow_changes` has data.train.
    """
    values = parse(before, lambda _line: Origin("values"))[0]["data"]
    blends = [values["train"], *(phase["sources"] for phase in values.get("phases") or ())]
    known: dict[str, set[str | None]] = {}  # several streams may have one name
    for each in (each for blend in blends for each in blend if each.get("stream")):
        for key in (each["name"], each["stream"]):
            known.setdefault(key, set()).add(each["shards"])
    streams = [
        (each.name, known.get(each.name, set()) | known.get(each.stream, set()), each.shards)
        for blend in (config.data.train, *(phase.sources for phase in config.data.phases))
        for each in blend
        if each.stream is not None
    ]
    changed = [f"{name}: {', '.join(map(str, old))} -> {now}" for name, old, now in streams if old and now not in old]
    if changed and "data.train" not in config.checkpoint.allow_changes:
        raise CheckpointError(
            subject,
            [
                "the files of a stream have changed, and so would the order of the data",
                *changed,
                "restore the files, or give this run its own run.dir (or run.name). "
                "To continue with another order, use checkpoint.allow_changes=[data.train]",
            ],
        )


def refuse_other_files(checkpoint: Checkpoint, engine: BaseEngine) -> None:
    """Refuse to resume an optimizer that depends on a file with another file: a path does not identify its contents.

    Raises:
        CheckpointError: with each key that `checkpoint.allow_changes` does not name.
    """
    allowed = engine.config.checkpoint.allow_changes
    keys = [
        key
        for key in engine.state.other_files(checkpoint.meta.optimizer)
        if not any(f"{key}.".startswith(f"{each}.") for each in allowed)
    ]
    if keys:
        raise CheckpointError(
            checkpoint.title,
            [
                *(f"the file of {key} must have the values that the checkpoint's steps were made with" for key in keys),
                "give that file again, or give this run its own run.dir (or run.name). To continue with another file, "
                f"use checkpoint.allow_changes=[{', '.join(keys)}]",
            ],
        )


def _same_name(line: str) -> bool:
    """Whether a tokenizer's file has only moved, for example to another cluster: same name, other folder."""
    before, _, after = line.partition(": ")[2].partition(" -> ")
    return Path(before.strip("'\"")).name == Path(after.strip("'\"")).name


def _as_of(values: dict[str, Any], completed: int) -> dict[str, Any]:
    """Plain values in the stage of the last of these updates."""
    ends = [each["until"] for each in values["training"].get("sequence_schedule") or []]
    number = sum(end <= max(completed - 1, 0) for end in ends)
    return stage_values(values, number)


def _leaves(values: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(values, dict):
        below = (_leaves(each, f"{prefix}.{name}" if prefix else name) for name, each in values.items())
        return {key: value for leaves in below for key, value in leaves.items()}
    return {prefix: values}


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
