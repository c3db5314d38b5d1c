"""The engine: DeepSpeed behind two methods, `step` and `evaluate`. The only file that calls `deepspeed.initialize`.

The loss of a step is the mean over all labels of the global batch that count. Each label's weight is
    weight * (replicas * accumulation) / (sum of weights in the global batch)
because DeepSpeed divides by the accumulation and averages gradients over the replicas, the ranks of the data and
context axes; so micro-batches and ranks with unequal numbers of labels still add up to the exact mean.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.config import Config
from megatron.config.arithmetic.wire import skips_late
from megatron.data.batch import StepBatch
from megatron.model.block import hands_on_states
from megatron.model.embedding_and_head import Reader
from megatron.model.stack import Model, ModelPlan
from megatron.parallel.layers.parameters import buffers_of, logical_of
from megatron.parallel.layout.mesh import Mesh, limit_groups, stage_axis
from megatron.parallel.messages.account import EVALUATE, phase
from megatron.worker.beacon import BACKWARD, FORWARD, OPTIMIZER, Beacon

from .adagc import AdaGC
from .deepspeed.clipping import GlobalClipping, global_limit
from .deepspeed.expert_groups import count_each_element_once, spread_experts
from .deepspeed.keep_fp32 import keeping_fp32
from .deepspeed.mpu import ModelParallelUnit
from .deepspeed.options import accumulation_steps, deepspeed_options, reduces_once, zero_stage
from .deepspeed.pipeline_schedule import Look, looked_into, with_phases
from .deepspeed.process import deepspeed_quietly
from .deepspeed.reduction import (
    average_gradients_in_place,
    average_groups_in_place,
    begin_sums_with_copies,
    compress_gradients,
    reduce_nothing,
    reduced_once,
    sum_buckets_in_place,
    sum_large_gradients_in_place,
    tell_of_reductions,
)
from .deepspeed.step_on_device import decide_on_device
from .deepspeed.zero_copies import norms_without_copies, update_in_place
from .deepspeed.zero_init import cut_as_they_are_made
from .document_limit import document_limit, refuse_more_documents
from .extras import StepExtras
from .layer_progress import ToldLayers
from .lengths import SequenceStages
from .micro_batches import LossAccumulator, MicroBatch, micro_batches
from .optimizers.build import build_optimizer, set_learning_rate
from .optimizers.matrix import MatrixOptimizer
from .protocol import LabelGroups, StepResult
from .replicas import PieceHashes
from .spikes import ADAGC
from .state import EngineState
from .state_hashes import StateAtRest
from .statistics import UpdateStatistics
from .teacher import Teacher, known
from .undo import Undo
from .update_gate import StepGate, has_gate

NO_LABELS = StepResult(loss=0.0, tokens=0.0, grad_norm=None, unlabelled=True)


class BaseEngine:
    """What both engines share: the optimizer, clipping at stage 0, label weights, numbers of a step."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        device: torch.device,
        values: bool = True,
        beacon: Beacon | None = None,
        teacher: Teacher | None = None,
    ):
        self.config, self.mesh, self.device, self.teacher = config, mesh, device, teacher
        self.beacon = beacon or Beacon()
        self.plan = ModelPlan(config, mesh, device, values=values)
        self.form, self.context = self.plan.form, self.plan.context
        self.accumulation = accumulation_steps(config, mesh.layout)
        self.options = deepspeed_options(config, mesh.layout)
        self.losses = LossAccumulator.zero(device)

    def _start(self, module: nn.Module, mpu: ModelParallelUnit | None) -> None:
        parameters = list(module.parameters())
        self.optimizer = build_optimizer(self.config, parameters)
        self.clipping = None
        stage = zero_stage(self.config, self.mesh.layout)
        if stage == 0:
            self.clipping = GlobalClipping(parameters, self.mesh, global_limit(self.config))
        self.rest = None if self.config.training.hashes is None else StateAtRest()
        if self.rest is not None:
            self.rest.attach(self.optimizer)
        self.gate = self._gate()
        if self.gate is not None:
            self.gate.attach(self.optimizer)
        elif self.clipping is not None:
            self.clipping.attach(self.optimizer)
        self.deepspeed = self._initialize(module, mpu)
        if self.mesh.replicas.size == self.mesh.expert_data.size == 1:
            reduce_nothing(self.deepspeed, stage)
        count_each_element_once(self.deepspeed.optimizer, self.mesh)
        forget_shapes = getattr(self.deepspeed, "reset_activation_shape", lambda: None)  # stages of a pipeline alone do
        self.stages = SequenceStages(self.config, module, forget_shapes)
        tell_of_reductions(self.deepspeed, self.beacon)
        sum_large_gradients_in_place(self.deepspeed)
        begin_sums_with_copies(self.deepspeed.optimizer)
        decide_on_device(self.deepspeed.optimizer, self.optimizer)
        norms_without_copies(self.deepspeed.optimizer)
        update_in_place(self.deepspeed.optimizer)
        wire = self.config.parallel.communication.compress.data
        compressed = wire != "none" and self.mesh.replicas.size > 1
        feedback = compress_gradients(self.deepspeed, wire, skips_late(self.config)) if compressed else None
        if not compressed:
            average_groups_in_place(self.deepspeed)
            average_gradients_in_place(self.deepspeed.optimizer)
            sum_buckets_in_place(self.deepspeed.optimizer)
        average = self.config.training.weight_average is not None
        self.state = EngineState(
            self.deepspeed, self.optimizer, parameters, self.mesh, stage, buffers_of(module), average
        )
        self.undo = Undo(self.state, self.gate, feedback)
        if self.gate is not None:
            self.gate.watch(self.deepspeed.optimizer)
        if self.rest is not None:
            self.rest.pieces, self.state.rest = PieceHashes(self.state), self.rest
        if self.gate is not None and self.config.spikes.action == ADAGC:
            limit = self.config.optimizer.gradient_clipping
            self.gate.adagc = AdaGC(self.config.spikes.adagc, limit, self.state, self.mesh, self.device)
        self.layers = ToldLayers(module, self.beacon)
        self.extras = StepExtras(module, self.config, self.mesh, self.device, self.plan, self.state)
        if isinstance(self.optimizer, MatrixOptimizer):
            held = self.state.held(lambda group: group["matrix"])
            self.optimizer.attach(held, stage_axis(self.mesh), self.device)

    def _gate(self) -> StepGate | None:
        """What looks at an update before it is applied, in runs that ask for it."""
        if not has_gate(self.config):
            return None

        def norm() -> Tensor | float | None:
            return self.clipping.norm if self.clipping else self.deepspeed.optimizer._global_grad_norm

        losses = (lambda: self.losses) if self.reports else (lambda: None)
        return StepGate(self.config, self.mesh, self.device, losses, norm, self.clipping)

    def _begin(self, step: int, lr: float) -> None:
        self.stages.enter(step)
        self.state.for_training()
        if self.plan.depth is not None:
            self.plan.depth.step = step
        set_learning_rate(self.optimizer, lr)
        self.losses = LossAccumulator.zero(self.device)
        if self.gate is not None:
            self.gate.begin()
        self.undo.begin()

    def _initialize(self, module: nn.Module, mpu: ModelParallelUnit | None) -> Any:
        import deepspeed

        if self.options["zero_optimization"]["stage"] > 0 and hands_on_states(module):
            # DeepSpeed would sum a full bucket in the midst of the backward pass, where the next rank waits for it and
            # this one for the gradient of a state from there.
            section = self.options["zero_optimization"]
            section["reduce_bucket_size"] = max(
                section["reduce_bucket_size"], sum(p.numel() for p in module.parameters())
            )
        with keeping_fp32(module.parameters()), spread_experts(self.optimizer, self.mesh):
            return deepspeed.initialize(
                model=module,
                optimizer=self.optimizer,
                config=self.options,
                mpu=mpu,
                dist_init_required=False,
                model_parameters=[p for p in module.parameters() if p.requires_grad],
            )[0]

    @property
    def module(self) -> nn.Module:
        """This rank's layers."""
        return self.deepspeed.module

    def save_native(self, folder: Path, tag: str, step: int) -> dict[str, str]:
        """Write a checkpoint in DeepSpeed's own format, `<folder>/<tag>`; every rank calls it.

        Returns:
            The name in that checkpoint of each parameter, by its logical name.
        """
        self.deepspeed.global_steps = step
        self.deepspeed.save_checkpoint(str(folder), tag=tag, client_state={"universal_checkpoint_info": {}})
        return {logical_of(parameter).name: name for name, parameter in self.deepspeed.module.named_parameters()}

    def update_statistics(self) -> UpdateStatistics:
        return UpdateStatistics(self.optimizer, self.state)

    def begin_average(self) -> None:
        self.state.begin_average()

    def advance_average(self, coefficient: float) -> None:
        self.state.advance_average(coefficient)

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        return self.state.averaged()

    def _micro_batches(self, batch: StepBatch, scale: Tensor | float, depth: int = 0) -> Iterator[MicroBatch]:
        if (most := document_limit(self.config, self.device)) is not None:
            refuse_more_documents(batch, most)
        form = self.form if self.teacher is None else self.teacher.widened(self.form)
        return micro_batches(batch, form, scale, self.device, self.context, depth)

    @property
    def reports(self) -> bool:
        """Whether this rank reports its labels: each label is reported by one rank."""
        return self.mesh.at.tensor == 0 and self.mesh.at.pipeline == self.mesh.pipeline.size - 1

    def _accumulator(self, groups: LabelGroups | None) -> LossAccumulator:
        """Nothing so far, of labels in these groups."""
        made = LossAccumulator.zero(self.device)
        if groups is not None and self.reports:
            made.groups = iter(self.context.cut(groups.ids.to(self.device), 2))
            made.sums = groups.sums
        return made

    def _scale(self, batch: StepBatch) -> float | Tensor | None:
        """Replicas times accumulation over the weight of all labels of the global batch; None if that is 0.

        To see that it is 0 the host waits for the sum, in runs alone whose labels have weights.
        """
        factor = self.mesh.replicas.size * batch.tokens.shape[0]
        if batch.loss_mask is None:
            return factor / (self.mesh.data.size * batch.tokens[..., 1:].numel())
        weight = batch.loss_mask.sum(dtype=torch.float64).to(self.device)
        if self.mesh.data.size > 1:
            dist.all_reduce(weight, group=self.mesh.data.group)
        return (factor / weight).float() if float(weight) else None

    def _result(self) -> StepResult:
        norm = self.clipping.norm if self.clipping else self.deepspeed.get_global_grad_norm()
        applied, spike = self.deepspeed.was_step_applied(), None
        overflow = not applied and self.config.precision.compute == "fp16"
        if self.gate is not None:
            self.gate.finish(applied)
            spike = self.gate.found
            applied = applied and self.gate.applies
        self.undo.end(applied)
        return StepResult(
            loss=self.losses.mean if self.reports else 0.0,
            tokens=self.losses.labels if self.reports else 0.0,
            grad_norm=norm,
            skipped=overflow,
            spike=spike,
            extras=self.extras.finish(applied, self.losses),
        )


class PlainEngine(BaseEngine):
    """One stage: ZeRO 0-3, tensor and data parallel."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        device: torch.device,
        values: bool = True,
        beacon: Beacon | None = None,
        teacher: Teacher | None = None,
    ):
        super().__init__(config, mesh, device, values, beacon, teacher)
        mpu = ModelParallelUnit(mesh)
        self._start(self._build(mpu), mpu)
        self.model: Model = self.deepspeed.module

    def _build(self, mpu: ModelParallelUnit) -> Model:
        if self.config.zero.stage < 3:
            return Model(self.plan)
        with cut_as_they_are_made(self.config, self.options, mpu):
            return Model(self.plan)

    @phase("exchange")
    def step(self, batch: StepBatch, lr: float, look: Look | None = None) -> StepResult:
        """Forward, backward and update on this rank's part of a batch."""
        count = batch.tokens.shape[0]
        self.beacon.at(FORWARD, *((1, count) if self.beacon.tells_of(count) else ()))
        self.layers.follow(count)
        self._begin(batch.step, lr)
        self.model.train()
        scale = self._scale(batch)
        if scale is None:
            return NO_LABELS
        self.losses.scale = scale
        if not reduces_once(self.config, self.mesh.layout):
            for number in self._passes(batch, scale, look):
                if number == count:  # before the last one DeepSpeed only counts
                    self.beacon.at(OPTIMIZER, count, count)
                self._update()
            return self._result()
        with reduced_once(self.deepspeed, self.beacon):
            passes = [*self._passes(batch, scale, look)]
        self.beacon.at(OPTIMIZER, count, count)
        for _ in passes:  # DeepSpeed counts micro-batches by these
            self._update()
        return self._result()

    def _passes(self, batch: StepBatch, scale: Tensor | float, look: Look | None) -> Iterator[int]:
        """Forward and backward of each micro-batch; gives its number, from 1."""
        count, each = batch.tokens.shape[0], not self.beacon.brief
        for number, micro in enumerate(self._micro_batches(batch, scale, len(self.plan.further)), 1):
            if number > 1 and look is not None:
                look(number - 1, count)
            if number > 1 and each:
                self.beacon.at(FORWARD, number, count)
            with phase("forward"):
                given, extras = (micro.tokens, micro.labels, micro.weights), known(micro.extras, self.form)
                taught = None if self.teacher is None else self.teacher.teach(micro)
                loss, ce, *kl = self.deepspeed(*given, **extras, further=micro.further, teacher=taught)
            self.losses.add(ce, micro.weights, *kl)
            if number == count and self.gate is not None:
                self.gate.losses_are_known()
            if each:
                self.beacon.at(BACKWARD, number, count)
            with phase("backward"):
                self.deepspeed.backward(loss)
            yield number

    @phase("update")
    def _update(self) -> None:
        self.deepspeed.step()

    @phase(EVALUATE)
    @torch.no_grad()
    def evaluate(self, batch: StepBatch, groups: LabelGroups | None = None) -> tuple[Tensor | float, Tensor | float]:
        """Sum of the losses of the labels that this rank reports, and their weight; see `protocol.Engine`."""
        self.model.eval()
        self.state.for_evaluation()
        losses = self._accumulator(groups)
        for micro in self._micro_batches(batch, 1.0):
            extras = known(micro.extras, self.form)
            losses.add(self.model(micro.tokens, micro.labels, micro.weights, **extras)[1], micro.weights)
        return (losses.loss, losses.weight) if self.reports else (0.0, 0.0)

    @phase(EVALUATE)
    @torch.no_grad()
    def read(self, batch: StepBatch, readers: Sequence[Reader]) -> list[Any]:
        """What each reader computes from its micro-batch; see `protocol.Engine`."""
        self.model.eval()
        self.state.for_evaluation()
        micros = zip(self._micro_batches(batch, 1.0), readers, strict=True)
        return [
            self.model(micro.tokens, micro.labels, micro.weights, **known(micro.extras, self.form), reader=reader)
            for micro, reader in micros
        ]

    def new_state(self) -> list[Any]:
        """See `protocol.ReadsOn`."""
        return self.model.new_state()

    @phase(EVALUATE)
    @torch.no_grad()
    def read_on(self, tokens_BS: Tensor, reader: Reader, state: list[Any], begin: int) -> Any:
        """See `protocol.ReadsOn`."""
        self.model.eval()
        self.state.for_evaluation()
        return self.model(tokens_BS, tokens_BS, tokens_BS, reader=reader, state=state, begin=begin)


class PipelinedEngine(BaseEngine):
    """Several stages under DeepSpeed's 1F1B schedule: ZeRO 0-1, tensor and data parallel."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        device: torch.device,
        values: bool = True,
        beacon: Beacon | None = None,
        teacher: Teacher | None = None,
    ):
        if teacher is not None:
            raise ValueError("a pipeline has no place for a teacher")
        super().__init__(config, mesh, device, values, beacon)
        from .deepspeed.stages import Pipeline

        self.pipeline = Pipeline(self.plan)
        self.head = self.pipeline.head_stage
        if self.head is not None:
            self.head.observe = lambda ce_BS, weights_BS: self.losses.add(ce_BS, weights_BS)
        self._start(self.pipeline, None)
        self.deepspeed._INSTRUCTION_MAP = with_phases(self.deepspeed._INSTRUCTION_MAP)

    def _feed(
        self, batch: StepBatch, scale: float | Tensor, depth: int = 0
    ) -> Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
        from .deepspeed.stages import stream_inputs

        for micro in self._micro_batches(batch, scale, depth):
            if self.head is not None:
                self.head.targets.append((micro.labels, micro.weights, micro.further))
            yield stream_inputs(self.form, micro.tokens, micro.extras), (micro.labels, micro.weights)

    @phase("exchange")
    def step(self, batch: StepBatch, lr: float, look: Look | None = None) -> StepResult:
        """Forward, backward and update on this rank's part of a batch."""
        self.beacon.at(FORWARD)
        self.layers.follow(batch.tokens.shape[0])
        self._begin(batch.step, lr)
        scale = self._scale(batch)
        if scale is None:
            return NO_LABELS
        self.losses.scale = scale
        with looked_into(self.deepspeed, look, self.beacon):
            self.deepspeed.train_batch(self._feed(batch, scale, len(self.plan.further)))
        return self._result()

    @phase(EVALUATE)
    @torch.no_grad()
    def evaluate(self, batch: StepBatch, groups: LabelGroups | None = None) -> tuple[Tensor | float, Tensor | float]:
        """Sum of the losses of the labels that this rank reports, and their weight; see `protocol.Engine`."""
        self.state.for_evaluation()
        self.losses = self._accumulator(groups)
        self.deepspeed.eval_batch(
            self._feed(batch, 1.0), reduce_output=None, bcast_loss=False, num_micro_batches=batch.tokens.shape[0]
        )
        return (self.losses.loss, self.losses.weight) if self.reports else (0.0, 0.0)

    @phase(EVALUATE)
    @torch.no_grad()
    def read(self, batch: StepBatch, readers: Sequence[Reader]) -> list[Any]:
        """What each reader computes from its micro-batch; see `protocol.Engine`."""
        self.state.for_evaluation()
        if self.head is not None:
            self.head.readers.extend(readers)
        self.deepspeed.reset_activation_shape()  # the stages agree on the shape of what they send anew
        try:
            self.deepspeed.eval_batch(
                self._feed(batch, 1.0), reduce_output=None, bcast_loss=False, num_micro_batches=batch.tokens.shape[0]
            )
            return [] if self.head is None else list(self.head.found)
        finally:
            self.deepspeed.reset_activation_shape()
            if self.head is not None:
                self.head.readers.clear()
                self.head.found.clear()


def build_engine(
    config: Config,
    mesh: Mesh,
    device: torch.device | str = "cpu",
    values: bool = True,
    beacon: Beacon | None = None,
    teacher: Teacher | None = None,
) -> PlainEngine | PipelinedEngine:
    """The engine for the run's layout; torch.distributed must be initialised, on one process too.

    Args:
        values: False leaves parameters without initial values, because a checkpoint will fill all of them.
        beacon: where steps tell what they are doing.
        teacher: what steps learn from, where the objective has one; nothing else asks for it.
    """
    kind = PipelinedEngine if mesh.pipeline.size > 1 else PlainEngine
    with deepspeed_quietly():
        engine = kind(config, mesh, torch.device(device), values, beacon, teacher)
    if mesh.timeout is not None:
        limit_groups(mesh.timeout)  # DeepSpeed gives its groups none
    return engine
