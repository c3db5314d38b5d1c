"""The engine of several pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron.config.arithmetic.pipelines import ASYNCHRONOUS, by_table
from megatron.data.batch import StepBatch
from megatron.model.embedding_and_head import LogitsAt, Reader
from megatron.model.own_texts import OwnTexts
from megatron.parallel.layout.precision import COMPUTE_TYPES
from megatron.parallel.messages.account import EVALUATE, phase
from megatron.worker.beacon import FORWARD

from .base import NO_LABELS, BaseEngine
from .deepspeed.pipeline_schedule import Look, any_zero_stage, looked_into, with_phases
from .deepspeed.placed import PlacedZero
from .deepspeed.process import ModelParallelUnit
from .deepspeed.scattered import ScatteredGradients
from .deepspeed.stages import Pipeline, stream_inputs
from .parts import TEACHER
from .protocol import LabelGroups, StepResult
from .stage_reader import StageReader

if TYPE_CHECKING:
    from .deepspeed.table import TableExecutor


class PipelinedEngine(BaseEngine):
    """Several stages under DeepSpeed's 1F1B schedule (ZeRO 0-1), or a table: tensor and data parallel."""

    def _assemble(self) -> None:
        if TEACHER in self.parts:
            raise ValueError("a pipeline cannot have a teacher")
        self.pipeline = Pipeline(self.plan)
        self.head = self.pipeline.head_stage
        if self.head is not None:
            self.head.observe = self._losses_of
        self.call_parts("module_made", self, self.pipeline)
        self.pipeline.find_copies()
        self._start(self.pipeline, None)
        if not self.config.deepspeed:  # whose options may have it print or write the mean loss
            # The engine adds losses itself. DeepSpeed's mean would be two messages more, and a wait of the host.
            self.deepspeed._aggregate_total_loss = lambda: None
        self.deepspeed._INSTRUCTION_MAP = with_phases(self.deepspeed._INSTRUCTION_MAP)
        self.table: TableExecutor | None = None
        if by_table(self.config.parallel, self.config.zero.stage):
            from .deepspeed.message_driven import MessageDriven
            from .deepspeed.table import TableExecutor

            driven = self.config.parallel.schedule == ASYNCHRONOUS
            if driven and self.device.type != "cpu":
                raise ValueError("parallel.schedule=asynchronous must run on CPUs: use 1f1b or interleaved")
            executor = MessageDriven if driven else TableExecutor
            self.table = executor(self.deepspeed, self.pipeline, self.beacon, self.scattered)

    def _initialize(self, module: nn.Module, mpu: ModelParallelUnit | None) -> Any:
        with any_zero_stage():
            return super()._initialize(module, mpu)

    def _scattered(self, each: bool, kernels: Any | None) -> ScatteredGradients:
        config = self.config
        if config.zero.stage == 1:
            return super()._scattered(each, None)
        wire = COMPUTE_TYPES["fp32" if config.precision.compute == "fp32" else config.precision.reduce]
        cuts = config.zero.stage == 3
        return PlacedZero(self.deepspeed, self.mesh, self.accumulation, each, wire, cuts_weights=cuts)

    def _feed(
        self, batch: StepBatch, scale: float | Tensor, depth: int = 0
    ) -> Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
        for micro in self._micro_batches(batch, scale, depth):
            if self.head is not None:
                self.head.targets.append((micro.labels, micro.weights, micro.further, micro.columns))
            yield stream_inputs(self.form, micro.tokens, micro.extras), (micro.labels, micro.weights)

    @phase("exchange")
    def step(self, batch: StepBatch, lr: float, look: Look | None = None) -> StepResult:
        """Forward, backward and update on this rank's part of a batch."""
        self.call_parts("before_passes", batch)
        self.beacon.at(FORWARD)
        self._begin(batch.step, batch.tokens.shape[0], lr)
        scale = self._scale(batch)
        if scale is None:
            self._left = False
            return NO_LABELS
        self.losses.scale = scale
        feed = self._feed(batch, scale, len(self.plan.further))
        if self.table is not None:
            self.table.train(feed, batch.tokens.shape[0], self._sizes(batch), look)
            return self._result()
        with looked_into(self.deepspeed, look, self.beacon):
            self.deepspeed.train_batch(feed)
        return self._result()

    def _sizes(self, batch: StepBatch) -> tuple[int, int]:
        """Samples of a micro-batch, and positions of each on this rank."""
        return batch.tokens.shape[1], batch.inputs.shape[-1] // self.mesh.layout.context

    def _forward_passes(self, batch: StepBatch) -> None:
        count, feed = batch.tokens.shape[0], self._feed(batch, 1.0)
        if self.table is not None:
            self.table.evaluate(feed, count, self._sizes(batch))
            return
        self.deepspeed.eval_batch(feed, reduce_output=None, bcast_loss=False, num_micro_batches=count)

    @phase(EVALUATE)
    @torch.no_grad()
    def evaluate(self, batch: StepBatch, groups: LabelGroups | None = None) -> tuple[Tensor | float, Tensor | float]:
        self.state.for_evaluation()
        self.losses = self._accumulator(groups)
        self._forward_passes(batch)
        return (self.losses.loss, self.losses.weight) if self.reports else (0.0, 0.0)

    @phase(EVALUATE)
    @torch.no_grad()
    def read(self, batch: StepBatch, readers: Sequence[Reader]) -> list[Any]:
        self.state.for_evaluation()
        if self.head is not None:
            self.head.readers.extend(readers)
        self.deepspeed.reset_activation_shape()  # the stages exchange shapes again
        try:
            self._forward_passes(batch)
            return [] if self.head is None else list(self.head.found)
        finally:
            self.deepspeed.reset_activation_shape()
            if self.head is not None:
                self.head.readers.clear()
                self.head.found.clear()

    @cached_property
    def reader(self) -> StageReader:
        return StageReader(self.pipeline, self.scattered if isinstance(self.scattered, PlacedZero) else None)

    def new_state(self) -> list[Any]:
        return self.reader.new_state()

    def read_on(self, tokens_BS: Tensor, reader: Reader, state: list[Any], begin: int | Tensor) -> Any:
        """Only `LogitsAt` of rows of one token each.

        Raises:
            TypeError: something else is asked for.
        """
        if not isinstance(reader, LogitsAt) or not isinstance(begin, Tensor):
            raise TypeError("stages of a pipeline continue rows of one token each, and read their logits")
        return self.read_later(tokens_BS, reader, state, begin)()

    @phase(EVALUATE)
    @torch.no_grad()
    def read_later(self, tokens_BS: Tensor, reader: LogitsAt, state: list[Any], begin: Tensor) -> Callable[[], Tensor]:
        self.pipeline.eval()
        self.state.for_evaluation()
        with self.own_texts():
            return self.reader.begin(tokens_BS, reader, state, begin)

    @cached_property
    def own_texts(self) -> OwnTexts:
        return OwnTexts(self.pipeline)
