"""Keys and rules of pruning (SAMO, Singh and Bhatele 2023, arXiv 2302.05045), without torch.

With f the share of elements that is kept, a weight in bf16 with AdamW takes 2 bytes while it is used. It always takes
f (2 + 4 + 4 + 4 + 4 + 4) bytes: for the kept weight, its place, its gradient, its master and two moments."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron.config.features.feature import Feature, Keys, only_where, wanted_features
from megatron.config.registry import load
from megatron.config.section import Section, key
from megatron.config.tree import thaw
from megatron.installation import run_apart

if TYPE_CHECKING:
    from megatron.config.problems import Problem
    from megatron.config.rule_context import RuleContext

NAME = "pruning"
OPTIMIZERS = ("adamw", "sgd", "lion")  # which update each element by itself
BESIDE = (NAME, "spikes", "noise_scale")  # features that read no element by its place
SCHEDULES = ("1f1b", "interleaved")
TENSORS = ".safetensors"


class PruningSection(Section):
    keep: float | None = key(
        None,
        "Share of the elements of all linear layers of blocks that is trained, by the largest magnitude. The others "
        "are 0. Embedding, head, norms, biases, routers and experts stay whole.",
        gt=0,
        le=1,
    )
    scope: Literal["global", "matrix"] = key("global", "Compare the magnitudes of all matrices, or of each by itself.")
    mask: str | None = key(
        None,
        "Checkpoint or safetensors file, by logical names, whose magnitudes decide. Without keep its elements other "
        "than 0 are kept, and matrices that a file lacks stay whole. By default the weights that the run begins with "
        "decide.",
    )


class PruningKeys(Section):
    pruning: PruningSection = key(PruningSection, "Train a pruned network, and store nothing of what was pruned.")


TOP = Keys("", PruningKeys, after="objective")


def pruning_of(config: Any) -> PruningSection:
    """The section of a `Config`."""
    return TOP.of(config).pruning


def wanted(config: Any) -> bool:
    options = pruning_of(config)
    return options.keep is not None or options.mask is not None


def layout_is_known(context: RuleContext) -> Iterator[Problem]:
    """Refuse layouts that are not tested, and keys whose code needs whole matrices."""
    config = context.config
    parallel, zero = config.parallel, config.zero
    cut = "cuts weights in another way than replicas and tensor parallel ranks do"
    found = {
        "zero.stage": (min(zero.stage, 1), zero.stage, "cuts gradients before they are compressed"),
        "zero.offload_optimizer.device": ("none", zero.offload_optimizer.device, "moves whole tensors"),
        "zero.offload_parameters.device": ("none", zero.offload_parameters.device, "moves whole tensors"),
        **{f"parallel.{name}": (1, getattr(parallel, name), cut) for name in ("columns", "depth", "context", "expert")},
        "parallel.async_tensor": (False, parallel.async_tensor, "multiplies with matrices outside of their layer"),
        "parallel.communication.compress.data": ("none", parallel.communication.compress.data, "rounds what is left"),
        "precision.products": ("compute", config.precision.products, "scales whole matrices"),
        "training.compile": ("off", config.training.compile, "traces parameters"),
        "checkpoint.initialize_vocabulary": ("same", config.checkpoint.initialize_vocabulary, "changes weights later"),
    }
    if parallel.schedule not in SCHEDULES:
        yield context.problem(
            "parallel.schedule",
            NAME,
            rule=f"must be {' or '.join(SCHEDULES)} with pruning: others compute gradients of weights apart, or in the "
            "order of arrival",
            fix=f"use parallel.schedule={SCHEDULES[0]}",
        )
    for name, (wanted_value, value, why) in found.items():
        if value != wanted_value and not (name == "training.compile" and value == "auto"):
            shown = str(wanted_value).lower()
            yield context.problem(
                name, NAME, rule=f"must be {shown} with pruning, since another value {why}", fix=f"use {name}={shown}"
            )
    for name in ("initialize_map", "initialize_layers"):
        if getattr(config.checkpoint, name):
            yield context.problem(
                f"checkpoint.{name}",
                NAME,
                rule="must be empty with pruning: the magnitudes of the weights at the start decide",
                fix="make the other model first, in a run without pruning",
            )


def parts_are_known(context: RuleContext) -> Iterator[Problem]:
    """Refuse optimizers, features and kinds that need whole matrices."""
    config = context.config
    if config.optimizer.type not in OPTIMIZERS:
        yield context.problem(
            "optimizer.type",
            NAME,
            rule=f"must be {', '.join(OPTIMIZERS[:-1])} or {OPTIMIZERS[-1]} with pruning: they update each element by "
            "itself",
            fix=f"use optimizer.type={OPTIMIZERS[0]}",
        )
    for name in wanted_features(config):
        if name not in BESIDE:
            yield context.problem(
                NAME, rule=f"must not be used together with {name}, which reads whole tensors", fix="remove one of them"
            )
    for use in context.used:
        kind = context.kinds[use.kind]
        if kind.whole or kind.clips_logits(use.options):
            yield context.problem(
                f"{NAME} model.{use.kind}",
                rule=f"must not be used with {use.kind} as it is here: its weights are changed outside of the "
                "optimizer, or are not of this program's layers",
                fix="turn off the clipping of logits, or use another kind",
            )


def mask_is_there(context: RuleContext) -> Iterator[Problem]:
    mask = pruning_of(context.config).mask
    if mask is not None:
        path = Path(mask)
        right = path.is_file() if mask.endswith(TENSORS) else path.is_dir()
        if not right:
            yield context.problem(
                "pruning.mask",
                rule=f"must be the folder of a checkpoint, or a file that ends with {TENSORS}, and exist",
                fix="correct the path, or remove it to use the weights that the run begins with",
            )


def mask_fits(context: RuleContext) -> Iterator[Problem]:
    """Refuse a file that does not fit the model. A run that starts elsewhere may have another file there."""
    mask = pruning_of(context.config).mask
    if mask is None or not context.here or not mask.endswith(TENSORS) or not Path(mask).is_file():
        return
    changed = Path(mask).stat()
    rule = _broken_rule(json.dumps(thaw(context.config.model_dump())), (changed.st_mtime_ns, changed.st_size))
    if rule:
        yield context.problem(
            "pruning.mask",
            rule=f"must fit the model: {rule}",
            fix="write the file again, by the names and shapes of a checkpoint's matrices",
        )


@lru_cache(maxsize=8)
def _broken_rule(config: str, changed: tuple[int, int]) -> str:
    """Of `check.py`, in a process of its own where torch is not imported yet."""
    if "torch" in sys.modules:
        return load("megatron.features.pruning.check:broken_rule")(config)
    done = run_apart("megatron.features.pruning.check", config)
    if done.returncode:
        return ""  # no torch here, for instance: ranks check it too
    return json.loads(done.stdout.strip().rsplit("\n", 1)[-1])


def scope_has_a_use(context: RuleContext) -> Iterator[Problem]:
    own = pruning_of(context.config)
    if own.keep is None and own.scope != "global":  # a resolved file gives the default
        yield context.problem(
            "pruning.scope",
            rule="must be global without pruning.keep, since no magnitudes are compared",
            fix="set pruning.keep, or remove it",
        )


def _memory(config: Any, layout: Any, weights: Any) -> dict[str, float]:
    """Bytes that pruning saves, and the bytes of its places. Vectors count as matrices here."""
    from megatron.config.arithmetic.pipeline_costs import live_micro_batches
    from megatron.plan.memory import states

    model, keep = config.model, pruning_of(config).keep
    if keep is None:  # a file knows it
        return {}
    tables = (1 if model.embedding.tied else 2) * model.vocab_size * model.hidden_size / layout.tensor
    pruned = max(0.0, weights.total - tables)
    share, whole = (1 - keep) * pruned / weights.total, states(config, layout, weights)
    size = 4 if config.precision.compute == "fp32" else 2
    saved = {name: -share * whole[name] for name in ("gradients", "states")}
    held = 1.0  # micro-batches. Each has whole matrices of its own until its gradients are due
    if layout.pipeline > 1 and config.training.activation_checkpointing.mode != "full":
        held = live_micro_batches(config.parallel, 0, config.training.accumulation or 1)
    return {**saved, "weights": (4 + size) * keep * pruned + (held - 1) * size * pruned}


FEATURE = Feature(
    about="Trains the largest elements of matrices, and stores nothing of the others.",
    wanted=wanted,
    keys=(TOP,),
    rules=(*only_where(wanted, (layout_is_known, parts_are_known, mask_is_there, mask_fits)), scope_has_a_use),
    engine="megatron.features.pruning.part:Pruning",
    reading=lambda config: config.model_copy(update={NAME: PruningSection()}),
    identity=tuple(f"pruning.{each}" for each in ("keep", "scope", "mask")),
    memory=_memory,
    traffic=lambda config: "the number of kept elements of each rank (pruning)",
)
