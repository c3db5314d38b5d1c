"""Messages of a step in closed form: the layers' sums, DeepSpeed's reductions, and the pipeline's sends.

ZeRO 1 and 2 reduce-scatter gradients in buckets (`engine/deepspeed/scattered.py`), ZeRO 2 in every micro-batch, and
gather updated weights. Where DeepSpeed 0.19.8 reduces them, as `deepspeed_options` configures it, they all-reduce.
Tests compare with counted accounts, byte by byte, and fail if a version of DeepSpeed sends other messages."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from megatron.config import Config, resolve
from megatron.config.arithmetic.pipelines import by_table, ranks_of_stages
from megatron.config.arithmetic.recurrence import Passes, core_of, passes_of_step
from megatron.config.arithmetic.wire import between_stages, bucket_elements, scatters_gradients
from megatron.config.features.feature import wanted_features
from megatron.config.teacher import on_layout
from megatron.config.variants import used_kinds
from megatron.model.costs.exchanges import BY_DOCUMENTS, MOST, layer_traffic, reading_exchanges
from megatron.model.costs.traffic import ONCE, NotPredicted, TensorAxis, reading_traffic, tensor_traffic
from megatron.model.expert_tally import ExpertTally
from megatron.model.partition import copies, rank_of, stage_bounds
from megatron.model.stack import ModelPlan
from megatron.objectives.named import objective_of
from megatron.parallel.layers.parameters import is_spread, logical_of
from megatron.parallel.layout.layout import AXES, Layout
from megatron.parallel.layout.mesh import Mesh
from megatron.parallel.layout.precision import type_name
from megatron.parallel.messages.account import group_name
from megatron.parallel.messages.traffic import LATER, SIZES, SPLIT, Call, Messages, Tally
from megatron.parallel.transport.compression import sum_messages
from megatron.parallel.transport.routes import Routes, planned_routes
from megatron.plan.messages.placed import placed_messages
from megatron.plan.messages.routed import RoutedTraffic

from ...engine.deepspeed.buckets import buckets_after, buckets_before, finished, in_buckets
from ...engine.deepspeed.options import accumulation_steps, reduces_once, zero_stage
from ...engine.optimizers.contract import optimizer_class
from ...engine.optimizers.groups import build_optimizer, parameter_groups
from ...engine.optimizers.matrix import MatrixOptimizer
from .matrices import matrix_messages, padded, row_traffic

FALLBACK_BUCKET = 500_000_000  # elements; DeepSpeed's MEMORY_OPT_ALLREDUCE_SIZE
META_BYTES = 1024  # of the message with a shape for the next stage: 256 int32 (TENSOR_META_SIZE)


@dataclass(frozen=True)
class TrafficPrediction:
    """The messages of one rank's steps.

    Attributes:
        settled: steps before the prediction holds: ZeRO 3 learns the order of the layers first, and ranks compare it.
        by_data: the kind of prediction (`LayerMessage`) of calls that depend on the data.
        varies: whether steps differ: passes of a recurrent core are drawn, or keys go as far as documents.
    """

    layout: Layout  # of the ranks
    routed: RoutedTraffic  # by which algorithms messages go
    around: Tally  # messages of every step outside of its layers
    layers: Callable[[int, Tensor | None], Tally]  # messages of the layers in a step
    first: Tally = field(default_factory=Tally)  # further messages of the first step: shapes between stages
    settled: int = 0
    by_data: Mapping[Call, str] = field(default_factory=dict)
    varies: bool = False

    @cached_property
    def step(self) -> Tally:
        """Messages of each step. If steps vary, of step 0."""
        return self.at(0)

    def at(self, step: int, documents: Tensor | None = None) -> Tally:
        """Messages of the step of this number.

        Args:
            documents: int [A, M, S] of this rank's batch (`StepBatch`), None if unknown.
        """
        return self.around + self.layers(step, documents)

    def calls(self, *decided: str) -> frozenset[Call]:
        """Calls that depend on the data in one of these ways."""
        return frozenset(call for call, how in self.by_data.items() if how in decided)


def predict(
    config: Config, ranks: int, rank: int, *, weighted: bool = False, routes: Routes | None = None
) -> TrafficPrediction:
    """Messages of a rank in a step of a resolved configuration, without the trainer's own sum.

    Args:
        weighted: labels have weights, whose sum over the data axis the engine takes.
        routes: the algorithms of a job. The default is the configuration's table, on hosts with equal numbers of
            consecutive ranks.

    Raises:
        NotPredicted: a part of the configuration, which the message names, has no formula.
    """
    layout = Layout.of(config, ranks)
    mesh = Mesh.describe(layout, rank)
    _refuse(config, layout)
    held = [place for place, at in enumerate(rank_of(config)) if at == mesh.at.pipeline]
    micro_batches = accumulation_steps(config, layout)
    found = _Predictor(config, mesh, held, micro_batches)
    routed = RoutedTraffic(routes or _planned(config, ranks), layout, rank)
    if objective_of(config).teacher is not None:
        found.add("exchange", "replicas", "all_reduce", "fp64", 2)  # the mean divergence
    if weighted or objective_of(config).weighs:
        found.add("exchange", "data", "all_reduce", "fp64", 1)
    found.gradients()
    if layout.pipeline > 1:
        found.stages()
    found.expert_loads()
    found.features()
    if issubclass(optimizer_class(config), MatrixOptimizer):
        for entry in matrix_messages(config, mesh, found.optimizer_at):
            found.step.add(*entry, SPLIT)
    settled = 0 if zero_stage(config, layout) < 3 else 2 if micro_batches == 1 else 1
    core = core_of(config.model.blocks)

    def layers(step: int, documents: Tensor | None) -> Tally:
        drawn = passes_of_step(config.model.recurrence, config.training.seed, step) if core else ONCE
        return routed.tally(found.layers(drawn, documents)[0])

    _, by_data = found.layers(ONCE, None)
    varies = bool(core) and layers(0, None) != Tally() and config.model.recurrence.sampling != "fixed"
    varies |= BY_DOCUMENTS in by_data.values()
    if routed.routes is not None and MOST in by_data.values():
        raise NotPredicted("there is no formula for slices of spread experts with a table, which chooses by size")
    return TrafficPrediction(
        layout, routed, routed.tally(found.step), layers, routed.tally(found.first), settled, by_data, varies
    )


def _planned(config: Config, ranks: int) -> Routes | None:
    try:
        return planned_routes(config.parallel.communication, ranks)
    except (OSError, ValueError) as error:
        raise NotPredicted(f"parallel.communication.table says nothing: {error}") from error


def _refuse(config: Config, layout: Layout) -> None:
    reasons = {
        "fp16": config.precision.compute == "fp16",
        "keys of `deepspeed`": bool(config.deepspeed),
        "clipped attention logits": any(kind.clips_logits(options) for _, kind, options in used_kinds(config.model)),
        "stages of sequence length, which have their own sizes": bool(config.training.sequence_schedule),
        "stages of batch size, which have their own micro-batches": bool(config.training.batch_schedule),
        "an objective that reads logits": objective_of(config).reads_logits,
        "an objective that reads costs of labels twice": objective_of(config).reads_labels,
        "a teacher whose rows ranks share": (layout.shares_rows or layout.depth > 1)
        and objective_of(config).teacher is not None,
    }
    if core_of(config.model.blocks) and config.model.recurrence.sampling != "fixed":
        # the order of modules is another one in each step
        reasons["a recurrent core at ZeRO 3 whose passes are drawn"] = zero_stage(config, layout) == 3
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
        own = self.layout
        self.axis = TensorAxis(own.tensor // own.columns, own.sequence, own.tensor_wire, own.depth, own.columns)
        self.step, self.first = Messages(), Messages()
        self.plan = ModelPlan(config, mesh, "meta", values=False)
        self.modules = _layers(self.plan, held)
        self.parameters = list(dict.fromkeys(self.modules.parameters()))
        self.groups = self._groups()
        self._optimizers: dict[tuple[int, int], MatrixOptimizer] = {}
        self.wire = config.parallel.communication.compress.data
        self.offloads = config.zero.offload_optimizer.device != "none"

    def add(
        self,
        phase: str,
        group: str,
        operation: str,
        dtype: str,
        elements: int,
        messages: int = 1,
        ranks: int = 0,
        kind: str = "",
    ) -> None:
        """Add messages with `elements` in total in a group of this rank, unless the group has one rank.

        Args:
            group: see `_groups`.
            ranks: of a pair, or a part of the axis. 0 means all.
            kind: see `Messages.add`.
        """
        name, size = self.groups[group]
        if (ranks or size) > 1:
            call = Call(phase, "", name, ranks or size, operation, dtype)
            self.step.add(call, messages, elements * SIZES[dtype], kind)

    def layers(self, core: Passes, documents: Tensor | None) -> tuple[Messages, dict[Call, str]]:
        """Messages of the layers, including a teacher's, in a step with `core` passes through a recurrent core, and the
        calls that depend on the data.

        Args:
            documents: int [A, M, S], None if unknown.
        """
        config, mesh, teacher, found = self.config, self.mesh, self.teacher, Messages()
        alike = [tensor_traffic(config, self.held, self.axis, core), row_traffic(config, mesh, self.modules, core)]
        if teacher is not None:
            alike.append(reading_traffic(teacher, self.axis))
        by_data: dict[Call, str] = {}
        for known in [None] if documents is None else documents:
            own = [layer_traffic(config, mesh, self.held, core, known)]
            own += [] if teacher is None else [reading_exchanges(teacher, mesh, known)]
            for each in own:
                _add(found, each.messages, self.micro_batches if known is None else 1)
                by_data |= each.by_data
        for messages in alike:
            _add(found, messages, self.micro_batches)
        return found, by_data

    @cached_property
    def teacher(self) -> Config | None:
        """The model that the run learns from, as this layout computes it."""
        if objective_of(self.config).teacher is None:
            return None
        return resolve(on_layout(self.config), ranks=self.layout.world_size)

    def _groups(self) -> dict[str, tuple[str, int]]:
        """Name in accounts and number of ranks of this rank's groups. They are its axes, the ranks with the same
        parameters (`replicas`), the ranks of one replica (`model`), and the ranks that share experts (`expert`) or hold
        the same experts (`expert_data`)."""
        layout, at = self.layout, self.mesh.at
        lines = {name: [replace(at, **{name: place}) for place in range(getattr(layout, name))] for name in AXES}
        lines["replicas"] = [layout.at_replica(at, place) for place in range(layout.replicas)]
        lines |= {"expert": layout.all_experts(at), "expert_data": layout.same_experts(at)}
        lines["model"] = [
            replace(at, pipeline=stage, tensor=own) for stage in range(layout.pipeline) for own in range(layout.tensor)
        ]
        return {
            name: (group_name(list(map(layout.rank, line)), layout, at) if len(line) > 1 else name, len(line))
            for name, line in lines.items()
        }

    def gradients(self) -> None:
        """The reduction of gradients, their norm, and the gathering of updated weights."""
        stage = zero_stage(self.config, self.layout)
        if stage == 0:
            own = [each for each in self.parameters if not is_spread(each)]
            self._reduced([[each] for each in own], FALLBACK_BUCKET)
            for group in parameter_groups(self.config, self.parameters):
                if is_spread(group["params"][0]):
                    spread = [[each] for each in group["params"]]
                    self._reduced(spread, FALLBACK_BUCKET, over="expert_data")
            for axis in ("expert", "tensor", "pipeline"):
                if axis != "expert" or self.layout.spreads_experts:
                    self.add("update", axis, "all_reduce", "fp32", 1)
            return
        found = parameter_groups(self.config, self.parameters)
        if scatters_gradients(self.config, self.layout):
            limit = bucket_elements(self.config, self.layout.replicas)
            if self.layout.pipeline > 1 and self.layout.zero_stage > 1:
                for each in placed_messages(self.config, self.mesh, self.held, self.modules, found, limit):
                    self.add(*each)
                found = []
            self._scattered([each["params"] for each in in_buckets(found, limit)])
            return
        groups = [group["params"] for group in found]
        if stage == 3:
            self._partitioned(len(groups))
            return
        if self.config.precision.compute == "bf16" and stage == 1 and self.config.precision.accumulate == "fp32":
            self._reduced([each for each in groups if not is_spread(each[0])], FALLBACK_BUCKET, wide=True)
            for group in (each for each in groups if is_spread(each[0])):
                self._reduced([group], FALLBACK_BUCKET, wide=True, over="expert_data")
            if any(is_spread(each[0]) for each in groups):
                self.add("update", "expert", "all_reduce", "fp32", 1)
            self._model_norm(1)
        else:
            order, once = [each for group in groups for each in group], reduces_once(self.config, self.layout)
            if not once and (stage == 2 or (self.config.zero.overlap and self.layout.pipeline == 1)):
                order = finished(self.modules)
            for _ in range(self.micro_batches if stage == 2 and not once else 1):
                self._bucketed(order, self.config.zero.bucket_size)
            joined = (self.layout.pipeline > 1 or self.layout.spreads_experts) and not self.offloads
            norms = 1 if joined else len(groups)
            self.add("update", "replicas", "all_reduce", "fp32", norms, norms)
            self._model_norm(norms)
            self._overflow()
        for group in groups:
            self._gathered(group)

    def _scattered(self, groups: list[list[nn.Parameter]]) -> None:
        """Gradients of each bucket to the ranks that update its parts, one norm, and the gathering of weights."""
        cut, mixed = self.layout.zero_stage >= 2, self.config.precision.compute != "fp32"
        times = self.micro_batches if cut and not reduces_once(self.config, self.layout) else 1
        for group in groups:
            over = "expert_data" if is_spread(group[0]) else "replicas"
            elements = padded(sum(each.numel() for each in group), self.groups[over][1])
            dtype = self.config.precision.reduce if mixed else "fp32"
            self.add("backward", over, "reduce_scatter", dtype, times * elements, times)
            self._gathered(group)
        self.add("update", "replicas", "all_reduce", "fp32", 1)
        self._model_norm(1)
        if cut or not mixed:
            self._overflow()

    def _overflow(self) -> None:
        """Check whether any rank's 16-bit gradients are finite. There is none in fp32, or at ZeRO 3 in bf16."""
        if self.config.precision.compute != "fp32":
            self.add("update", "replicas", "all_reduce", "uint8", 1)
            self._model_norm(1, "uint8")

    def _partitioned(self, groups: int) -> None:
        """ZeRO 3 of a model that is gathered at once. In each micro-batch weights are gathered and gradients scattered.
        Weights that stay gathered on all ranks are gathered one by one after the update."""
        zero, ranks = self.config.zero, self.layout.replicas
        whole = {each: -(-each.numel() // ranks) * ranks for each in self.parameters}
        stay = [each for each in self.parameters if each.numel() <= zero.persistent_size]
        away = [each for each in self.parameters if each.numel() > zero.persistent_size]
        if sum(map(torch.Tensor.numel, away)) > zero.prefetch_size or sum(whole.values()) > zero.bucket_size:
            raise NotPredicted("there is no formula for ZeRO 3 that gathers or reduces a micro-batch in several pieces")
        m, reduce = self.micro_batches, self.config.precision.reduce
        if self.config.precision.compute == "fp32":
            reduce = "fp32"
        for dtype in dict.fromkeys(each.dtype for each in away):
            gathered = sum(whole[each] for each in away if each.dtype == dtype)
            self.add("forward", "replicas", "all_gather", type_name(dtype), m * gathered, m)
        times = 1 if reduces_once(self.config, self.layout) else m
        self.add("backward", "replicas", "reduce_scatter", reduce, times * sum(whole.values()), times)
        norms = "fp32" if self.offloads else "fp64"
        self.add("update", "replicas", "all_reduce", norms, groups, groups)
        self._model_norm(groups, norms)
        for each in stay:
            self.add("update", "replicas", "all_gather", type_name(each.dtype), whole[each], kind=LATER)

    def _reduced(
        self, tensors: list[list[nn.Parameter]], bucket: int, *, wide: bool = False, over: str = "replicas"
    ) -> None:
        """Sums of gradients in buckets of one type each, sent as soon as they are larger than `bucket`. Larger tensors
        are sent separately.

        Args:
            tensors: the parameters whose gradients are one tensor.
            wide: the gradients are fp32 for all types of parameters.
            over: which group.
        """
        by_type: dict[str, list[int]] = {}
        for together in tensors:
            if size := sum(each.numel() for each in together):
                by_type.setdefault("fp32" if wide else type_name(together[0].dtype), []).append(size)
        for sizes in by_type.values():
            self._summed(buckets_after(sizes, bucket), over)

    def _bucketed(self, order: list[nn.Parameter], limit: int) -> None:
        """Sums of gradients in buckets that are sent before they would be larger than `limit`. In a bucket with spread
        experts, each group's part is a message."""
        for bucket in buckets_before(order, limit):
            parts: dict[str, int] = {}
            for each in bucket:
                over = "expert_data" if is_spread(each) else "replicas"
                over = "replicas" if self.groups[over] == self.groups["replicas"] else over
                parts[over] = parts.get(over, 0) + each.numel()
            for over, elements in parts.items():
                self._summed([elements], over)

    def _summed(self, messages: list[int], over: str) -> None:
        """Sums of gradients with these numbers of elements."""
        dtype = self.config.precision.reduce if self.config.precision.compute != "fp32" else "fp32"
        for elements in messages:
            if self.wire == "none":
                self.add("backward", over, "all_reduce", dtype, elements)
                continue
            exchanged, gathered = sum_messages(self.wire, elements, self.groups[over][1])
            self.add("backward", over, "all_to_all", "uint8", exchanged)
            self.add("backward", over, "all_gather", "uint8", gathered)

    def _model_norm(self, messages: int, dtype: str = "fp32") -> None:
        """Sums of norms over the ranks of the tensor and pipeline axes."""
        self.add("update", "model", "all_reduce", dtype, messages, messages)

    def _gathered(self, group: list[nn.Parameter]) -> None:
        """Gather a group's updated weights in one buffer, padded to equal parts."""
        over = "expert_data" if is_spread(group[0]) else "replicas"
        elements = padded(sum(each.numel() for each in group), self.groups[over][1])
        self.add("update", over, "all_gather", type_name(group[0].dtype), elements)

    def stages(self) -> None:
        """Activations, their gradients, and copies of weights."""
        rank, bounds, homes = self.mesh.at.pipeline, stage_bounds(self.config), ranks_of_stages(self.config.parallel)
        for stage in range(1, len(bounds) - 1):  # that receives a stream
            ends = [("recv", "send")] * (homes[stage] == rank) + [("send", "recv")] * (homes[stage - 1] == rank)
            for forward, backward in ends * (len(ends) < 2):  # none in the bend of a V
                for dtype, elements, floats in self._stream(bounds[stage]):
                    count = self.micro_batches
                    self.add("forward", "pipeline", forward, dtype, elements * count, count, 2)
                    if floats:
                        self.add("backward", "pipeline", backward, dtype, elements * count, count, 2)
                if not by_table(
                    self.config.parallel, self.config.zero.stage
                ):  # DeepSpeed's engine sends the shapes too
                    self.first.add(Call("forward", "", "pipeline", 2, forward, "int32"), 1, META_BYTES)
        for name, holders in copies(self.config).items():
            if rank in holders:
                for each in (one for one in self.parameters if logical_of(one).name.startswith(f"{name}.")):
                    stage, elements = zero_stage(self.config, self.layout), each.numel()
                    wide = stage == 2 or (self.config.precision.compute == "bf16" and stage == 1)
                    if stage == 2:  # this rank's part
                        elements = padded(elements, self.layout.replicas) // self.layout.replicas
                    dtype = "fp32" if wide else type_name(each.dtype)
                    self.add("backward", "pipeline", "all_reduce", dtype, elements, 1, len(holders))

    def optimizer_at(self, mesh: Mesh) -> MatrixOptimizer:
        """The optimizer of another rank of this stage, without values. There is one for each way to split parameters,
        for any number of replicas."""
        key = mesh.at.tensor, mesh.expert.rank
        if key not in self._optimizers:
            layers = _layers(ModelPlan(self.config, mesh, "meta", values=False), self.held)
            optimizer = build_optimizer(self.config, list(dict.fromkeys(layers.parameters())))
            assert isinstance(optimizer, MatrixOptimizer)
            self._optimizers[key] = optimizer
        return self._optimizers[key]

    def _stream(self, border: int) -> Iterator[tuple[str, int, bool]]:
        """The tensors between two stages: (type, elements, whether it has a gradient). The floats are one."""
        training, model = self.config.training, self.config.model
        form, samples = self.plan.form_at(border - 1), training.micro_batch_size
        cut = self.layout.tensor if self.layout.sequence else 1
        own = training.sequence_length // self.layout.context
        length = own // cut
        width = form.sample_width(self.plan.width, cut)
        stream = "fp32" if model.residual.fp32 else self.config.precision.compute
        wire = self.config.parallel.communication.compress.pipeline
        common = form.common_width(self.plan.width, cut)
        dtype, elements = between_stages(wire, length * width, common, stream)
        yield dtype, samples * elements, True
        sizes = {"positions": own, "documents": own, "samples": 1}
        types = {"positions": "int32", "documents": "int32", "samples": "int64"}
        for name in form.optional:
            yield types[name], samples * sizes[name], False

    def expert_loads(self) -> None:
        """The table of all mixtures' loads, summed over data and stages."""
        experts = {n: experts for n, kind, own in used_kinds(self.config.model) if (experts := kind.experts(own))}
        if experts:
            elements = len(experts) * (2 * max(experts.values()) + ExpertTally.EXTRA)
            for axis in ("replicas", "pipeline"):
                self.add("exchange", axis, "all_reduce", "fp32", elements)

    def features(self) -> None:
        """Messages of the parts of features."""
        for feature in wanted_features(self.config).values():
            sent = feature.traffic(self.config)
            if isinstance(sent, str):
                raise NotPredicted(f"there is no formula for {sent}")
            for each in sent:
                self.add(each.phase, each.group, each.operation, each.dtype, each.elements, each.messages)


def _add(found: Messages, more: Messages, times: int) -> None:
    for call, messages, size, kind in more.each():
        found.add(call, times * messages, times * messages * size, kind)


def _layers(plan: ModelPlan, held: list[int]) -> nn.Module:
    """This rank's layers, without values."""
    modules = nn.ModuleList()
    shared: dict[str, nn.Module] = {}
    embedding, norm = plan.embedding() if held[0] == 0 else None, plan.config.model.recurrence.norm
    for place in held:
        if place == 0 and embedding is not None:
            modules.append(embedding)
        elif place <= len(plan.blocks):
            modules.append(plan.block(place - 1, shared))
            if place == plan.inside.stop and norm == "head" and held[-1] <= len(plan.blocks):
                modules.append(plan.head_norm())  # of the core's last state (a head, if there is one, has the weights)
        elif plan.head_embeds:
            modules.append(plan.head(plan.tokens() if embedding is None else embedding.tokens.weight))
        else:
            modules.append(plan.head())
    return modules
