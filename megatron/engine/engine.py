"""Engines: DeepSpeed behind two methods, `step` and `evaluate`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.config import Config
from megatron.data.batch import StepBatch
from megatron.model.embedding_and_head import Reader
from megatron.model.kernels.compile import choose_compilation
from megatron.model.own_texts import OwnTexts
from megatron.model.stack import Model, make_model
from megatron.parallel.layout.mesh import Mesh, limit_groups
from megatron.parallel.messages.account import EVALUATE, phase
from megatron.worker.beacon import BACKWARD, FORWARD, OPTIMIZER, Beacon

from .base import NO_LABELS, BaseEngine
from .deepspeed.options import reduces_once
from .deepspeed.pipeline_schedule import Look
from .deepspeed.process import ModelParallelUnit, cut_as_they_are_made, cut_parameters, deepspeed_quietly
from .deepspeed.reduction import reduced_once
from .micro_batches import inputs_of
from .part import EnginePart
from .protocol import LabelGroups, StepResult

if TYPE_CHECKING:
    from .pipelined import PipelinedEngine


class PlainEngine(BaseEngine):
    """One stage: ZeRO 0-3, tensor and data parallel."""

    def _assemble(self) -> None:
        mpu = ModelParallelUnit(self.mesh)
        third = self.config.zero.stage == 3
        cut = third and not self.plan.whole
        if cut and choose_compilation(self.config, self.device)[0] != "off":
            importlib.import_module("torch._dynamo")  # which fails where DeepSpeed cuts parameters as they are made
        with cut_as_they_are_made(self.config, self.options, mpu) if cut else nullcontext():
            model = make_model(self.plan, on_host=third)
        if third and not cut:
            cut_parameters(model, self.options, mpu, self.device)
        self.call_parts("module_made", self, model)
        self._start(model, mpu)
        self.model: Model = self.deepspeed.module

    @phase("exchange")
    def step(self, batch: StepBatch, lr: float, look: Look | None = None) -> StepResult:
        """Forward, backward and update on this rank's part of a batch."""
        count = batch.tokens.shape[0]
        self.call_parts("before_passes", batch)
        self.beacon.at(FORWARD, *((1, count) if self.beacon.tells_of(count) else ()))
        self._begin(batch.step, count, lr)
        self.model.train()
        scale = self._scale(batch)
        if scale is None:
            self._left = False
            return NO_LABELS
        self.losses.scale = scale
        if self.scatters or not reduces_once(self.config, self.mesh.layout):
            for number in self._passes(batch, scale, look):
                if number == count:  # before, DeepSpeed's step only counts micro-batches
                    self.beacon.at(OPTIMIZER, count, count)
                self._update()
            return self._result()
        with reduced_once(self.deepspeed, self.beacon):
            passes = [*self._passes(batch, scale, look)]
        self.beacon.at(OPTIMIZER, count, count)
        for _ in passes:  # DeepSpeed counts micro-batches by its calls
            self._update()
        return self._result()

    def _passes(self, batch: StepBatch, scale: Tensor | float, look: Look | None) -> Iterator[int]:
        """Forward and backward of each micro-batch. Yields its number, from 1."""
        count, each = batch.tokens.shape[0], not self.beacon.brief
        for number, micro in enumerate(self._micro_batches(batch, scale, len(self.plan.further)), 1):
            if number > 1 and look is not None:
                look(number - 1, count)
            if number > 1 and each:
                self.beacon.at(FORWARD, number, count)
            with phase("forward"):
                given: dict[str, Any] = {**inputs_of(micro, self.form), "columns": micro.columns}
                for more in self.call_parts("forward_inputs", micro):
                    given |= more
                read = (micro.tokens, micro.labels, micro.weights)
                loss, ce, *others = self.deepspeed(*read, **given, further=micro.further)
            self._losses_of(ce, micro.weights, *others)
            if number == count:
                self.call_parts("losses_known")
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
        self.model.eval()
        self.state.for_evaluation()
        losses = self._accumulator(groups)
        for micro in self._micro_batches(batch, 1.0):
            given = inputs_of(micro, self.form)
            ce_BS = self.model(micro.tokens, micro.labels, micro.weights, **given, columns=micro.columns)[1]
            losses.add(ce_BS, micro.weights)
        return (losses.loss, losses.weight) if self.reports else (0.0, 0.0)

    @phase(EVALUATE)
    @torch.no_grad()
    def read(self, batch: StepBatch, readers: Sequence[Reader]) -> list[Any]:
        self.model.eval()
        self.state.for_evaluation()
        micros = zip(self._micro_batches(batch, 1.0), readers, strict=True)
        return [
            self.model(micro.tokens, micro.labels, micro.weights, **inputs_of(micro, self.form), reader=reader)
            for micro, reader in micros
        ]

    def new_state(self) -> list[Any]:
        return self.model.new_state()

    @phase(EVALUATE)
    @torch.no_grad()
    def read_on(self, tokens_BS: Tensor, reader: Reader, state: list[Any], begin: int | Tensor) -> Any:
        self.model.eval()
        self.state.for_evaluation()
        with self.own_texts():
            return self.model(tokens_BS, tokens_BS, tokens_BS, reader=reader, state=state, begin=begin)

    @cached_property
    def own_texts(self) -> OwnTexts:
        return OwnTexts(self.model)


def build_engine(
    config: Config,
    mesh: Mesh,
    device: torch.device | str = "cpu",
    values: bool = True,
    beacon: Beacon | None = None,
    teacher: EnginePart | None = None,
) -> PlainEngine | PipelinedEngine:
    """The engine for the run's layout. torch.distributed must be initialised, on one process too.

    Args:
        values: False leaves parameters without initial values: a checkpoint will fill all of them.
        teacher: model that the student learns from, for an objective with a teacher.
    """
    kind: type[PlainEngine] | type[PipelinedEngine] = PlainEngine
    if mesh.pipeline.size > 1:
        from .pipelined import PipelinedEngine

        kind = PipelinedEngine
    with deepspeed_quietly():
        engine = kind(config, mesh, torch.device(device), values, beacon, teacher)
    if mesh.timeout is not None:
        limit_groups(mesh.timeout)  # DeepSpeed's groups have no time limit
    return engine
