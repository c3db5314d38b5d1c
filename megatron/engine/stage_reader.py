"""Tokens that follow earlier ones, read by the stages of a pipeline. Each rank has the states of its own blocks."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.config.arithmetic.pipelines import GATHER, RELEASE, Instruction, ranks_of_stages
from megatron.model.embedding_and_head import LogitsAt
from megatron.model.stream import Stream, StreamForm
from megatron.parallel.layout.mesh import Axis

from .deepspeed.placed import PlacedZero
from .deepspeed.stages import BlockStage, CoreStage, EmbeddingStage, HeadStage, Pipeline


class StageReader:
    """Sends the stream from stage to stage, and the logits from the last one to all.

    Args:
        placed: gathers the weights of a stage at ZeRO 3.
    """

    def __init__(self, pipeline: Pipeline, placed: PlacedZero | None) -> None:
        self.pipeline, self.plan, self.placed = pipeline, pipeline.plan, placed
        self.axis: Axis = self.plan.mesh.pipeline
        self.homes = ranks_of_stages(self.plan.config.parallel)
        self.own = [stage for stage, home in enumerate(self.homes) if home == self.axis.rank]

    def new_state(self) -> list[Any]:
        """Empty decoding states of this rank's blocks, in order."""
        found = list[Any]()
        for layer in (layer for stage in self.own for layer in self.pipeline.layers_of(stage)):
            if isinstance(layer, CoreStage) and layer.core is not None:
                found.append(layer.core.new_state())
            elif isinstance(layer, BlockStage):
                found.append(layer.block.new_state())
        return found

    def begin(self, tokens_T1: Tensor, reader: LogitsAt, states: list[Any], begin: Tensor) -> Callable[[], Tensor]:
        """Read this rank's part, and return what waits for the logits [N, V], which all ranks of the pipeline get.

        All of them call it in one order. Several passes over different texts may be under way."""
        left, stream, logits, sent = iter(states), None, None, list[tuple[Tensor, Any]]()
        for stage in self.own:
            if stage and self.homes[stage - 1] != self.axis.rank:
                stream = self._receive(stage, len(tokens_T1), begin)
            self._place(GATHER, stage)
            for layer in self.pipeline.layers_of(stage):
                if isinstance(layer, EmbeddingStage):
                    stream = layer.embedding(tokens_T1, positions=begin)
                elif isinstance(layer, HeadStage):
                    assert stream is not None
                    logits = layer.head(stream, tokens_T1, tokens_T1, reader).contiguous()
                elif isinstance(layer, BlockStage | CoreStage):
                    stream = self._block(layer, stream, next(left), begin)
            self._place(RELEASE, stage)
            if stage + 1 < len(self.homes) and self.homes[stage + 1] != self.axis.rank:
                assert stream is not None
                whole = self._form(stage + 1).join(self._form(stage + 1).pack(stream))[0].contiguous()
                sent.append((whole, dist.isend(whole, group=self.axis.group, group_dst=self.homes[stage + 1])))
        return self._shared(logits, len(reader.rows), sent)

    @staticmethod
    def _block(layer: BlockStage | CoreStage, stream: Stream | None, state: Any, begin: Tensor) -> Stream:
        assert stream is not None
        if isinstance(layer, CoreStage):
            assert layer.core is not None
            return layer.core(stream, state, begin)
        return layer.block(stream, state)

    def _form(self, stage: int) -> StreamForm:
        """The floats of the stream before a stage. Ranks know the positions."""
        form = self.plan.form_at(self.pipeline.parts[stage] - 1)
        return replace(form, positions=False, documents=False, samples=False)

    def _receive(self, stage: int, rows: int, begin: Tensor) -> Stream:
        form, hidden = self._form(stage), self.plan.width
        shape = [rows, form.sample_width(hidden, 1)] if form.channels else [rows, 1, hidden]
        found = torch.empty(shape, dtype=self.plan.stream_dtype, device=self.plan.device)
        dist.recv(found, group=self.axis.group, group_src=self.homes[stage - 1])
        return replace(form.unpack(form.split((found,), hidden, 1)), positions=begin)

    def _place(self, kind: str, stage: int) -> None:
        if self.placed is not None:
            self.placed.execute(Instruction(stage, kind, 0))

    def _shared(self, logits: Tensor | None, rows: int, sent: list[tuple[Tensor, Any]]) -> Callable[[], Tensor]:
        if logits is None:
            size = rows, self.plan.config.model.vocab_size
            logits = torch.empty(size, dtype=torch.float32, device=self.plan.device)
        whole = logits
        work = dist.broadcast(whole, group=self.axis.group, group_src=self.homes[-1], async_op=True)

        def wait() -> Tensor:
            for each in (*(work for _, work in sent), work):
                each.wait()
            return whole

        return wait
