"""The parts of an engine, in the order in which they attach and are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.config.features.feature import in_order, wanted_features
from megatron.config.kind import LayerKind
from megatron.config.registry import load
from megatron.config.variants import used_kinds
from megatron.objectives.named import objective_of

from ..part import EnginePart

if TYPE_CHECKING:
    from ..base import BaseEngine

COMPRESSION, TEACHER = "compression", "teacher"  # names that others ask for


@dataclass(frozen=True)
class PartEntry:
    """A part: its name, its class by import path, and whether an engine wants it."""

    name: str
    path: str
    wanted: Callable[[BaseEngine], bool]


def _compresses(engine: BaseEngine) -> bool:
    return engine.config.parallel.communication.compress.data != "none" and engine.mesh.replicas.size > 1


def _counts_documents(engine: BaseEngine) -> bool:
    return engine.config.model.fused_attention.documents == "varlen" and engine.device.type == "cuda"


def _any_kind(engine: BaseEngine, has: Callable[[LayerKind], Callable[..., int]]) -> bool:
    return any(has(kind)(options) for _, kind, options in used_kinds(engine.config.model))


PARTS = (
    # Replaces DeepSpeed's sums: before parts that read summed gradients replace later methods.
    PartEntry(COMPRESSION, "megatron.engine.parts.compressed_sums:CompressedSums", _compresses),
    # Sets the rotary tables of a step: before a part reads its batch.
    PartEntry(
        "lengths", "megatron.engine.parts.stages:SequenceStages", lambda e: bool(e.config.training.sequence_schedule)
    ),
    # Sets the number of a step's micro-batches in DeepSpeed: before a gradient is made.
    PartEntry("batches", "megatron.engine.parts.stages:BatchStages", lambda e: bool(e.config.training.batch_schedule)),
    PartEntry("documents", "megatron.engine.parts.document_limit:DocumentLimit", _counts_documents),
    # Replaces the forward of blocks while layers are slow. Only an agent reads its reports.
    PartEntry("layer_progress", "megatron.engine.parts.layer_progress:LayerProgress", lambda e: e.beacon.shared),
    # From here on, the order is that of the messages after an update. The last one shrinks masters: after all readers.
    PartEntry(
        "experts", "megatron.engine.parts.expert_load:ExpertLoad", lambda e: _any_kind(e, lambda kind: kind.experts)
    ),
    PartEntry(TEACHER, "megatron.engine.parts.teacher:Teacher", lambda e: False),  # made before the engine
    PartEntry(
        "objective", "megatron.engine.parts.objective:ObjectiveReport", lambda e: objective_of(e.config).reads_labels
    ),
    PartEntry("probes", "megatron.engine.parts.objective:Probes", lambda e: objective_of(e.config).probes),
    PartEntry(
        "recurrent_depth", "megatron.engine.parts.recurrent_depth:RecurrentDepth", lambda e: e.plan.depth is not None
    ),
    PartEntry(
        "logit_clipping",
        "megatron.engine.parts.logit_clipping:LogitClipping",
        lambda e: _any_kind(e, lambda kind: kind.clips_logits),
    ),
)


def build_parts(engine: BaseEngine, given: Mapping[str, EnginePart | None]) -> dict[str, EnginePart]:
    """The parts that an engine wants, by name, in order.

    Args:
        given: parts that were made before it.
    """
    inside, features = {entry.name: entry for entry in PARTS}, wanted_features(engine.config)
    features = {name: feature for name, feature in features.items() if feature.engine}
    found: dict[str, EnginePart] = {}
    for name in in_order(inside, {name: feature.before for name, feature in features.items()}):
        part = given.get(name)
        if part is None and (name in features or inside[name].wanted(engine)):
            part = load(features[name].engine if name in features else inside[name].path)()
        if part is not None:
            found[name] = part
    return found
