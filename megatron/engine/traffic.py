"""What a step sends, in closed form: the layers' sums, DeepSpeed's reductions, and the pipeline's sends.

The rules of the data and pipeline axes are those of DeepSpeed 0.19.8 as `deepspeed_options` configures it, which are
not the textbook's: ZeRO 1 all-reduces gradients (it scatters nothing) and gathers updated weights; ZeRO 2 does the
former in every micro-batch. Tests compare with counted accounts, byte by byte, so that another version of DeepSpeed
that sends something else fails them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from megatron.config import Config
from megatron.config.recurrence import core_of
from megatron.config.variants import used_kinds
from megatron.model.expert_tally import ExpertTally
from megatron.model.partition import copies, stage_of
from megatron.model.stack import ModelPlan
from megatron.model.traffic import SIZES, NotPredicted, TensorAxis, tensor_traffic
from megatron.objectives.named import objective_of
from megatron.parallel.account import _TYPES, group_name
from megatron.parallel.compression import sum_messages
from megatron.parallel.layout import Layout
from megatron.parallel.mesh import Mesh
from megatron.parallel.parameters import logical_of
from megatron.parallel.traffic import Call, Tally

from .deepspeed_options import accumulation_steps, zero_stage
from .optimizers.groups import parameter_groups
from .optimizers.matrix import MatrixOptimizer
from .optimizers.named import optimizer_class

FALLBACK_BUCKET = 500_000_000  # elements; DeepSpeed's MEMORY_OPT_ALLREDUCE_SIZE
ALIGNMENT = 2  # elements; DeepSpeed's nccl_start_alignment_factor, of each rank's part of a group
META_BYTES = 1024  # of the message that tells the next stage a shape: 256 int32 (TENSOR_META_SIZE)


@dataclass(frozen=True)
class TrafficPrediction:
    """One rank's step.

    Attributes:
        step: what every step sends.
        first: what the first one sends besides: stages tell each other shapes.
        layout: of the ranks.
        settled: steps before what is predicted; ZeRO 3 learns the order of the layers first, and the ranks compare it.
    """

    layout: Layout
    step: Tally
    first: Tally = field(default_factory=Tally)
    settled: int = 0


def predict(config: Config, ranks: int, rank: int, *, weighted: bool = False) -> TrafficPrediction:
    """What a rank sends in a step of a resolved configuration, without the trainer's own sum.

    Args:
        weighted: labels have weights, whose sum over the data axis the engine takes.

    Raises:
        NotPredicted: the configuration has a part for which there is no formula; the message says which.
    """
    layout = Layout.of(config, ranks)
    mesh = Mesh.describe(layout, rank)
    _refuse(config, layout)
    stages = stage_of(config)
    held = [place for place, stage in enumerate(stages) if stage == mesh.at.pipeline]
    micro_batches = accumulation_steps(config, layout)
    found = _Predictor(config, mesh, held, micro_batches)
    tensor = tensor_traffic(config, held, TensorAxis(layout.tensor, layout.sequence))
    for call, messages, size in tensor:
        found.step.add(call, messages * micro_batches, size * micro_batches)
    if weighted or objective_of(config).weighs:
        found.add("exchange", "data", "all_reduce", "fp64", 1)
    found.gradients()
    if layout.pipeline > 1:
        found.stages()
    found.expert_loads()
    found.further_losses()
    settled = 0 if zero_stage(config, layout) < 3 else 2 if micro_batches == 1 else 1
    return TrafficPrediction(layout, found.step, found.first, settled)


def _refuse(config: Config, layout: Layout) -> None:
    """Name the parts that have no formula."""
    compute, zero = config.precision.compute, config.zero
    reasons = {
        "experts spread over ranks (their bytes depend on the tokens)": layout.spreads_experts,
        "fp16": compute == "fp16",
        "an offloaded optimizer": zero.offload_optimizer.device != "none",
        "keys of `deepspeed`": bool(config.deepspeed),
        "optimizers of whole matrices": issubclass(optimizer_class(config), MatrixOptimizer),
        "a balancing loss over ranks": layout.data > 1 and "'over': 'ranks'" in str(config.model.model_dump()),
    }
    reasons["clipped attention logits"] = any(
        kind.clips_logits(options) for _, kind, options in used_kinds(config.model)
    )
    reasons["algorithms that a table chooses"] = config.parallel.communication.table is not None
    reasons["a recurrent core, which each step repeats anew"] = bool(core_of(config.model.blocks))
    reasons["a teacher"] = objective_of(config).teacher is not None
    reasons["ranks that share sequences"] = config.parallel.context > 1
    for reason, holds in reasons.items():
        if holds:
            raise NotPredicted(f"there is no formula for {reason}")


class _Predictor:
    """Adds up one rank's step.

    Args:
        held: places of this rank's layers in the list [embedding, blocks..., head].
    """

    def __init__(self, config: Config, mesh: Mesh, held: list[int], micro_batches: int) -> None:
        self.config, self.mesh, self.layout, self.held = config, mesh, mesh.layout, held
        self.micro_batches = micro_batches
        self.step, self.first = Tally(), Tally()
        self.plan = ModelPlan(config, mesh, "meta", values=False)
        self.module = _layers(self.plan, held)
        self.parameters = list(dict.fromkeys(self.module.parameters()))
        self.wire = config.parallel.communication.compress.data
        self.last_stage = mesh.at.pipeline == self.layout.pipeline - 1

    def add(
        self, phase: str, group: str, operation: str, dtype: str, elements: int, messages: int = 1, ranks: int = 0
    ) -> None:
        """Messages of `elements` in all on an axis of this rank; nothing where the axis has one rank."""
        ranks = (
            ranks or {"tensor": self.layout.tensor, "data": self.layout.data, "pipeline": self.layout.pipeline}[group]
        )
        if ranks > 1:
            self.step.add(Call(phase, "", group, ranks, operation, dtype), messages, elements * SIZES[dtype])

    def gradients(self) -> None:
        """The reduction of gradients, their norm, and the gathering of updated weights."""
        stage = zero_stage(self.config, self.layout)
        if stage == 0:
            self._reduced([[each] for each in self.parameters], FALLBACK_BUCKET, packed_after=True)
            for axis in ("tensor", "pipeline"):
                self.add("update", axis, "all_reduce", "fp32", 1)
            return
        groups = [group["params"] for group in parameter_groups(self.config, self.parameters)]
        if stage == 3:
            self._partitioned(len(groups))
            return
        if self.config.precision.compute == "bf16" and stage == 1 and self.config.precision.accumulate == "fp32":
            self._reduced(groups, FALLBACK_BUCKET, packed_after=True, wide=True)
            self._model_norm(1)
        else:
            self._same_type(f"bf16 with parameters in fp32 at ZeRO {stage}")
            order = [each for group in groups for each in group]
            if stage == 2 or (self.config.zero.overlap and self.layout.pipeline == 1):
                order = self.parameters[::-1]  # as the backward pass finishes them
            for _ in range(self.micro_batches if stage == 2 else 1):
                self._reduced([[each] for each in order], self.config.zero.bucket_size, packed_after=False)
            norms = 1 if self.layout.pipeline > 1 else len(groups)
            self.add("update", "data", "all_reduce", "fp32", norms, norms)
            self._model_norm(norms)
            self._overflow()
        for group in groups:
            self._gathered(group)

    def _same_type(self, what: str) -> None:
        if len({each.dtype for each in self.parameters}) > 1:
            raise NotPredicted(f"there is no formula for {what}")

    def _overflow(self) -> None:
        """Whether any rank's 16-bit gradients are finite; nobody asks in fp32, nor at ZeRO 3 in bf16."""
        if self.config.precision.compute != "fp32":
            self.add("update", "data", "all_reduce", "uint8", 1)
            self._model_norm(1, "uint8")

    def _partitioned(self, groups: int) -> None:
        """ZeRO 3 of a model that is gathered at once: in each micro-batch its weights, but for those that stay
        everywhere, which are gathered one by one after the update; and its gradients, scattered."""
        zero, ranks = self.config.zero, self.layout.data
        self._same_type("ZeRO 3 with parameters of several types")
        padded = {each: -(-each.numel() // ranks) * ranks for each in self.parameters}
        stay = [each for each in self.parameters if each.numel() <= zero.persistent_size]
        away = [each for each in self.parameters if each.numel() > zero.persistent_size]
        if sum(map(torch.Tensor.numel, away)) > zero.prefetch_size or sum(padded.values()) > zero.bucket_size:
            raise NotPredicted("there is no formula for ZeRO 3 that gathers or reduces a micro-batch in several pieces")
        dtype = _TYPES[self.parameters[0].dtype]
        m, reduce = self.micro_batches, self.config.precision.reduce if dtype != "fp32" else "fp32"
        if away:
            self.add("forward", "data", "all_gather", dtype, m * sum(padded[each] for each in away), m)
        self.add("backward", "data", "reduce_scatter", reduce, m * sum(padded.values()), m)
        self.add("update", "data", "all_reduce", "fp64", groups, groups)
        self._model_norm(groups, "fp64")
        if stay:
            self.add("update", "data", "all_gather", dtype, sum(padded[each] for each in stay), len(stay))

    def _reduced(
        self, tensors: list[list[nn.Parameter]], bucket: int, *, packed_after: bool, wide: bool = False
    ) -> None:
        """Sums of gradients in buckets of one type each.

        Args:
            tensors: the parameters whose gradients are one tensor.
            packed_after: a bucket is sent when it is larger than `bucket`, and tensors that are on their own; else a
                bucket is sent before it would be.
            wide: the gradients are fp32 whatever the parameters are.
        """
        compute = self.config.precision.compute
        by_type: dict[str, list[int]] = {}
        for together in tensors:
            if size := sum(each.numel() for each in together):
                by_type.setdefault("fp32" if wide else _TYPES[together[0].dtype], []).append(size)
        for sizes in by_type.values():
            dtype = self.config.precision.reduce if compute != "fp32" else "fp32"
            filled = _buckets_after(sizes, bucket) if packed_after else _buckets_before(sizes, bucket)
            if self.wire == "none":
                self.add("backward", "data", "all_reduce", dtype, sum(filled), len(filled))
                continue
            for elements in filled:
                exchanged, gathered = sum_messages(self.wire, elements, self.layout.data)
                self.add("backward", "data", "all_to_all", "uint8", exchanged)
                self.add("backward", "data", "all_gather", "uint8", gathered)

    def _model_norm(self, messages: int, dtype: str = "fp32") -> None:
        """Sums of norms over the ranks that hold other parts of the model: those of tensor and pipeline axes."""
        if self.layout.pipeline == 1:
            self.add("update", "tensor", "all_reduce", dtype, messages, messages)
            return
        ranks = self.layout.tensor * self.layout.pipeline
        at = self.mesh.at
        members = [
            (stage * self.layout.data + at.data) * self.layout.tensor + place
            for stage in range(self.layout.pipeline)
            for place in range(self.layout.tensor)
        ]
        self.add("update", group_name(members, self.layout, at), "all_reduce", dtype, messages, messages, ranks)

    def _gathered(self, group: list[nn.Parameter]) -> None:
        """A group's updated weights, which lie in one buffer, padded to equal parts."""
        unit, elements = ALIGNMENT * self.layout.data, sum(each.numel() for each in group)
        self.add("update", "data", "all_gather", _TYPES[group[0].dtype], -(-elements // unit) * unit)

    def stages(self) -> None:
        """Activations, their gradients, copies of weights, and the loss."""
        stage, stages = self.mesh.at.pipeline, self.layout.pipeline
        for neighbour, border, forward, backward in (
            (stage - 1, self.held[0], "recv", "send"),
            (stage + 1, self.held[-1] + 1, "send", "recv"),
        ):
            if not 0 <= neighbour < stages:
                continue
            for dtype, elements, floats in self._stream(border):
                count = self.micro_batches
                self.add("forward", "pipeline", forward, dtype, elements * count, count, 2)
                if floats:
                    self.add("backward", "pipeline", backward, dtype, elements * count, count, 2)
            self.first.add(Call("forward", "", "pipeline", 2, forward, "int32"), 1, META_BYTES)
        for name, holders in copies(self.config).items():
            if stage in holders:
                for each in self._named(name):
                    wide = self.config.precision.compute == "bf16" and zero_stage(self.config, self.layout) == 1
                    dtype = "fp32" if wide else _TYPES[each.dtype]
                    self.add("backward", "pipeline", "all_reduce", dtype, each.numel(), 1, len(holders))
        if self.last_stage:
            self.add("exchange", "data", "all_reduce", "fp32", 1)
        self.add("exchange", "pipeline", "broadcast", "fp32", 2)  # the loss, of this rank's batch and of all

    def _named(self, prefix: str) -> Iterator[nn.Parameter]:
        return (each for each in self.parameters if logical_of(each).name.startswith(f"{prefix}."))

    def _stream(self, border: int) -> Iterator[tuple[str, int, bool]]:
        """The tensors between two stages: (type, elements, whether it has a gradient). The floats are one."""
        training, model = self.config.training, self.config.model
        form, samples = self.plan.form_at(border - 1), training.micro_batch_size
        cut = self.layout.tensor if self.layout.sequence else 1
        length = training.sequence_length // cut
        widths = sum((cut if each.whole else 1) * each.width for each in form.channels.values())
        dtype = "fp32" if model.residual.fp32 else self.config.precision.compute
        yield dtype, samples * length * (model.hidden_size + widths), True
        sizes = {"positions": training.sequence_length, "documents": training.sequence_length, "samples": 1}
        types = {"positions": "int32", "documents": "int32", "samples": "int64"}
        for name in form.optional:
            yield types[name], samples * sizes[name], False

    def expert_loads(self) -> None:
        """The table of all mixtures' loads, summed over data and stages."""
        experts = {
            number: experts
            for number, kind, options in used_kinds(self.config.model)
            if (experts := kind.experts(options))
        }
        if experts:
            elements = len(experts) * (2 * max(experts.values()) + ExpertTally.EXTRA)
            for axis in ("data", "pipeline"):
                self.add("exchange", axis, "all_reduce", "fp32", elements)

    def further_losses(self) -> None:
        """The sums of the modules that predict further tokens, over data and stages."""
        if depth := len(self.config.model.further_blocks):
            for axis in ("data", "pipeline"):
                self.add("exchange", axis, "all_reduce", "fp64", 2 * depth)


def _layers(plan: ModelPlan, held: list[int]) -> nn.Module:
    """This rank's layers, without values."""
    modules = nn.ModuleList()
    shared: dict[str, nn.Module] = {}
    embedding = plan.embedding() if held[0] == 0 else None
    for place in held:
        if place == 0 and embedding is not None:
            modules.append(embedding)
        elif place <= len(plan.blocks):
            modules.append(plan.block(place - 1, shared))
        elif plan.head_embeds:
            modules.append(plan.head(plan.tokens() if embedding is None else embedding.tokens.weight))
        else:
            modules.append(plan.head())
    return modules


def _buckets_after(sizes: Iterable[int], limit: int) -> list[int]:
    """Elements of messages where a bucket is sent as soon as it has more than `limit`, and larger tensors alone."""
    sizes = list(sizes)
    messages, filled = [size for size in sizes if size > limit], 0
    for size in (each for each in sizes if each <= limit):
        filled += size
        if filled > limit:
            messages.append(filled)
            filled = 0
    return messages + [filled] * bool(filled)


def _buckets_before(sizes: Iterable[int], limit: int) -> list[int]:
    """Elements of messages where a bucket is sent when the next parameter would make it larger than `limit`."""
    messages, filled = [], 0
    for size in sizes:
        if filled and filled + size > limit:
            messages.append(filled)
            filled = 0
        filled += size
    return messages + [filled] * bool(filled)
