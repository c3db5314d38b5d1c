"""Memory of a layout in closed form, on the stage that needs most, as DeepSpeed 0.19.8 lays it out.

Bytes per parameter, with r replicas, as `engine/deepspeed/options.py` configures it (Rajbhandari et al. 2020 has the
textbook's figures, which differ):
    bf16, ZeRO 1, sums in fp32   weights 2, sums 4, states (4 + moments) / r
    fp32, one replica            weights 4, gradients 4, moments, also at ZeRO 1
    other ZeRO 1                 weights 2 or 4, gradients as sums are kept, states (4 + moments) / r
    ZeRO 2                       weights, gradients / r and a bucket, states / r
    ZeRO 3                       all / r, and the weights that are gathered at one time
Stage i of p holds min(p - i, m) micro-batches at a time (1F1B).
"""

from dataclasses import dataclass, field
from typing import Any

from megatron.config import Config
from megatron.config.arithmetic.pipeline_costs import live_micro_batches
from megatron.config.arithmetic.wire import FEEDS_BACK, bucket_elements, scatters_gradients, skips_late
from megatron.config.features.feature import wanted_features
from megatron.config.optimizer_kind import state_bytes
from megatron.objectives.named import objective_of
from megatron.parallel.layout.layout import Layout
from megatron.parallel.messages.traffic import SIZES

from .candidate import Candidate, layout_of, on_device
from .devices import Cluster
from .shapes import RankWeights, Shapes

RUNTIME = 1.5 * 2**30  # bytes: context of the device, libraries' workspaces, channels of communicators
FRAGMENTS = 0.06  # of what is allocated: what the caching allocator cannot use
FALLBACK_BUCKET = 500_000_000  # elements that DeepSpeed's bf16 optimizer reduces at once
TIGHT = 0.9  # of a device's memory: from here on a layout is called near the limit
LIVE = 1_000_000_000  # elements that ZeRO 3 keeps gathered (stage3_max_live_parameters)


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank of a stage.

    Attributes:
        parts: weights, teacher, gradients, states, `left out` (error feedback of compressed gradients), activations,
            working (temporary tensors of one layer), loss, buckets, runtime, fragments, and parts that features add.
    """

    stage: int  # of the pipeline
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def passing(self) -> float:
        """The part that a micro-batch needs: activations, temporary tensors of a layer, the loss."""
        return sum(self.parts[name] for name in ("activations", "working", "loss"))

    def to_json(self) -> dict[str, Any]:
        return {"stage": self.stage, "total": round(self.total), **{key: round(n) for key, n in self.parts.items()}}


def states(config: Config, layout: Layout, weights: RankWeights) -> dict[str, float]:
    """Bytes of weights, gradients and optimizer state."""
    size, zero = SIZES[config.precision.compute], layout.zero_stage
    mixed, offload = config.precision.compute != "fp32", config.zero.offload_optimizer.device != "none"
    if zero == 1 and layout.replicas == 1 and not mixed and not offload:
        zero = 0  # as the engine does, since there is no rank to share with
    sums = SIZES[config.precision.accumulate] if mixed else 4
    per = 4 + state_bytes(config) if mixed or zero else state_bytes(config)
    dense, spread = layout.replicas, layout.expert_data
    low, wide, expert = weights.low, weights.wide, weights.expert
    held = size * (low + expert) + 4 * wide
    owned = weights.dense / dense + expert / spread
    result = {"weights": held, "gradients": float(sums * weights.total), "states": per * owned}
    if zero == 0:
        result["states"] = per * weights.total
    elif zero == 1 and mixed and sums == 4 and layout.replicas > 1 and not scatters_gradients(config, layout):
        result["gradients"] += size * weights.total  # of a micro-batch, and on one replica they are freed as they come
    elif zero == 2:
        result["gradients"] = sums * owned
    elif zero == 3:
        result["weights"] = (size * low + 4 * wide) / dense + size * expert / spread
        result["gradients"] = sums * owned
    if zero > 1 and config.zero.reduce == "step" and (config.training.accumulation or 1) > 1:
        result["gradients"] += size * weights.total  # whole, until the last micro-batch
    if offload:
        result["states"] = 0.0
    if (
        config.parallel.communication.compress.data in FEEDS_BACK
    ):  # in fp32, of what is sent and of the own part of sums
        parts = ((weights.dense, dense), (weights.expert, spread))
        each = 8 if skips_late(config) else 4
        result["left out"] = sum(each * number * (1 + 1 / ranks) for number, ranks in parts if ranks > 1)
    return result


def buckets(config: Config, layout: Layout, weights: RankWeights, largest: int) -> float:
    """Bytes of flat copies for communication and of weights that ZeRO 3 gathers.

    Args:
        largest: parameters of the largest layer.
    """
    zero, mixed = config.zero, config.precision.compute != "fp32"
    if layout.replicas == 1 or layout.zero_stage == 0:
        return 0.0
    size = SIZES[config.precision.compute]
    reduced = SIZES[config.precision.reduce] if mixed else 4
    if scatters_gradients(config, layout):  # two on their way, and the one that is being filled
        apart, gathered = layout.zero_stage >= 2 or reduced < 4, 0.0
        if layout.zero_stage == 3:  # whole weights of a stage. With `step`, at some time of all stages
            stages = 1 if config.zero.reduce == "step" else config.parallel.stages_per_rank
            gathered = size * weights.total / stages
        flying = reduced * min(3 * bucket_elements(config, layout.replicas), weights.total) if apart else 0.0
        return float(flying + gathered)
    if layout.zero_stage == 1 and mixed and config.precision.accumulate == "fp32":
        return float(reduced * min(FALLBACK_BUCKET, weights.total))
    bucket = min(zero.bucket_size, weights.total) * size * (2 if zero.overlap and layout.pipeline == 1 else 1)
    if layout.zero_stage == 3:
        live = min(weights.total, max(2 * largest, min(LIVE, zero.prefetch_size + largest)))
        return float(bucket + size * live)
    return float(bucket)


def teacher_bytes(shapes: Shapes, choice: Candidate) -> float:
    """Bytes of the weights of a teacher, which replicas do not share."""
    weights = shapes.weights(choice, range(shapes.places))
    return float(SIZES[shapes.config.precision.compute] * (weights.low + weights.expert) + 4 * weights.wide)


def rank_memory(config: Config, shapes: Shapes, choice: Candidate, rank: int) -> Memory:
    """Peak memory of a rank of the pipeline."""
    layout, places = layout_of(choice, shapes.ranks), shapes.held(config)[rank]
    training, size = config.training, SIZES[config.precision.compute]
    tokens = choice.micro_batch * training.sequence_length / choice.context
    weights = shapes.weights(choice, places)
    parts = states(config, layout, weights)
    kinds = [shapes.layer(place, choice) for place in places]
    flying = live_micro_batches(config.parallel, rank, training.accumulation or 1)
    modes = [shapes.recomputes(config, choice, place) for place in places]
    parts["activations"] = flying * tokens * sum(each.saved[mode] for each, mode in zip(kinds, modes))
    working = max(each.whole for each in kinds) * tokens
    again = choice.recompute != "none" or training.sequence_chunks > 1
    parts["working"] = (working if again else 0.5 * working) / training.sequence_chunks
    stream = config.model.hidden_size * size * tokens / choice.columns
    if choice.pipeline > 1:
        parts["working"] += 2 * max(2, flying * choice.stages_per_rank) * stream
    # With its gradient, in the compute type and in fp32. The two of a forward pass (`layers/ahead.py`) need no more.
    gathered = max(each.gathered for each in kinds)
    parts["working"] += gathered * (4 + size + (size if size < 4 else 0))
    parts["loss"] = 0.0
    if places[-1] + 1 == shapes.places:
        rows = -(-config.model.vocab_size // choice.grid)
        chunk = min(training.tokens_of_loss(config.model.vocab_size) or tokens, tokens)
        # A chunk's logits in fp32, their gradients in the compute type, and the head's gradient in fp32.
        parts["loss"] = chunk * rows * (4 + size) + 4 * rows * config.model.hidden_size
        if kinds[-1].rows:  # of all ranks that share them
            parts["loss"] += size * rows * config.model.hidden_size
        if objective_of(config).reads_logits:
            parts["loss"] += 12 * chunk * rows  # what autograd keeps: a cost with exp(logit), and their gradients
        if shapes.teacher is not None:
            parts["teacher"] = teacher_bytes(shapes.teacher, choice)
            parts["loss"] += 12 * chunk * rows  # its logits, and both distributions
    for feature in wanted_features(config).values():
        for name, size_of in feature.memory(config, layout, weights).items():
            parts[name] = parts.get(name, 0.0) + size_of
    largest = max(each.own.total for each in kinds)
    exchange = buckets(config, layout, weights, largest)
    passing = parts["activations"] + parts["working"] + parts["loss"]
    after = layout.zero_stage == 1 and config.precision.compute != "fp32" and config.precision.accumulate == "fp32"
    after = after and not scatters_gradients(config, layout)
    # The bf16 optimizer reduces after the last backward pass, when activations are gone.
    parts["buckets"] = max(0.0, exchange - passing) if after else exchange
    held = sum(parts.values())
    return Memory(rank, {**parts, "runtime": RUNTIME, "fragments": FRAGMENTS * held})


def memory(config: Config, shapes: Shapes, choice: Candidate, at: Cluster) -> Memory:
    """Memory of the rank of the pipeline that needs most."""
    stages = {0, choice.pipeline - 1} if choice.pipeline > 1 else {0}
    if choice.pipeline > 2:
        stages |= {1, choice.pipeline - 2}
    config = on_device(config, at.device.name != "cpu")
    found = [rank_memory(config, shapes, choice, stage) for stage in sorted(stages)]
    most = max(found, key=lambda each: each.total)
    if at.device.name == "cpu":
        parts = {**most.parts, "runtime": 0.4 * 2**30}  # Python with torch and DeepSpeed
        return Memory(most.stage, parts)
    return most
