"""The whole model as a list of layers, and the part of it that one pipeline stage holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron.config import Config
from megatron.config.pattern import BlockPattern
from megatron.config.variants import options_of
from megatron.objectives.named import objective_of
from megatron.parallel.context import ContextGroup
from megatron.parallel.mesh import Mesh
from megatron.parallel.parameters import ParameterFactory

from .block import Block, BlockState, block_channels
from .compile import compile_forward
from .embedding_and_head import Embedding, Head, Reader
from .initialisation import Initialisation
from .options import kind_of
from .parametrization import Parametrization
from .recompute import recompute_activations
from .stream import Channel, Stream, StreamForm, live_channels

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class ModelPlan:
    """How to build any layer of a run's model: the list is embedding, blocks, head."""

    config: Config
    mesh: Mesh
    device: torch.device | str = "cpu"
    dtype: torch.dtype | None = None
    values: bool = True

    @cached_property
    def blocks(self) -> tuple[BlockPattern, ...]:
        return self.config.model.blocks

    @cached_property
    def init(self) -> Initialisation:
        model = self.config.model
        return Initialisation(model.init, model.hidden_size, len(self.blocks), factors=self.factors)

    @cached_property
    def factors(self) -> Parametrization:
        return Parametrization.of(self.config.model, self.config.optimizer.type)

    def factory(self, prefix: str, factors: Parametrization | None = None) -> ParameterFactory:
        dtype, scales = self.dtype or DTYPES[self.config.precision.compute], (factors or self.factors).scales
        return ParameterFactory(self.mesh, self.config.training.seed, self.device, dtype, prefix, self.values, scales)

    @property
    def context(self) -> ContextGroup:
        """The ranks that share each sample's tokens with this one."""
        return ContextGroup.of(self.mesh)

    @cached_property
    def live_channels(self) -> list[dict[str, Channel]]:
        """The float side channels of the stream before each block and before the head."""
        model, ranks = self.config.model, self.mesh.tensor.size
        return live_channels([block_channels(model, block, ranks) for block in self.blocks])

    def form_at(self, index: int) -> StreamForm:
        """The form of the stream before the block of this index (or, after the last, before the head)."""
        return replace(self.form, channels=self.live_channels[index])

    @property
    def form(self) -> StreamForm:
        """The side channels that all of this run's streams have."""
        model, data = self.config.model, self.config.data
        kinds = {each for block in self.blocks for each in block.kinds}
        draws = any(kind_of(model, each).draws(options_of(model, each)) for each in kinds)
        documents, shared = data.reset_attention_at_eod, self.mesh.context.size > 1
        return StreamForm(positions=documents or shared, documents=documents, samples=draws or model.dropout > 0.0)

    def embedding(self) -> Embedding:
        return Embedding(self.factory("embedding"), self.config.model, self.init, tuple(self.live_channels[0]))

    def block(self, index: int, shared: dict[str, nn.Module] | None = None) -> Block:
        """`shared`: modules that the blocks of one rank share (see `Block`)."""
        block = Block(
            self.factory(f"layers.{index}", self.factors.in_block),
            self.config.model,
            self.blocks[index],
            self.init.at(index),
            shared,
        )
        compile_forward(block, self.config, self.device)
        recompute_activations(block, index, self.config.training.activation_checkpointing)
        return block

    def head(self, tied: nn.Parameter | None = None) -> Head:
        config = self.config
        return Head(self.factory(""), config.model, config.training, self.init, objective_of(config), tied)


class Blocks(nn.ModuleList):
    """The blocks of a rank, in order."""

    def __iter__(self) -> Iterator[Block]:
        return cast(Iterator[Block], super().__iter__())


class Model(nn.Module):
    """All layers on one rank (of each tensor parallel group)."""

    def __init__(self, plan: ModelPlan):
        super().__init__()
        self.plan, self.form = plan, plan.form
        self.embedding = plan.embedding()
        shared: dict[str, nn.Module] = {}
        self.blocks = Blocks(plan.block(index, shared) for index in range(len(plan.blocks)))
        tied = self.embedding.tokens.weight if plan.config.model.embedding.tied else None
        self.head = plan.head(tied)

    def stream(
        self,
        tokens_BS: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        samples: Tensor | None = None,
    ) -> Stream:
        stream = self.embedding(tokens_BS, positions, documents, samples)
        for block in self.blocks:
            stream = block(stream)
        return stream

    def forward(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor,
        weights_BS: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        samples: Tensor | None = None,
        reader: Reader | None = None,
    ) -> Any:
        """(weighted sum of token losses, each token's cross-entropy [B, S]); with a `reader`, what it gives instead."""
        return self.head(self.stream(tokens_BS, positions, documents, samples), labels_BS, weights_BS, reader)

    def logits(self, tokens_BS: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """fp32 logits [B, S, V]."""
        return self.head.logits(self.stream(tokens_BS, positions, documents))

    def new_state(self) -> list[BlockState]:
        """Empty decoding state, one entry per block."""
        return [block.new_state() for block in self.blocks]

    def decode(self, tokens_BS: Tensor, state: list[BlockState], begin: int) -> Tensor:
        """Logits [B, S, V] of tokens that follow the `begin` tokens already in `state`, which grows by them."""
        stream = self.embedding(tokens_BS, begin=begin)
        for block, own in zip(self.blocks, state):
            stream = block(stream, own)
        return self.head.logits(stream)


def build_model(
    config: Config,
    mesh: Mesh | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    values: bool = True,
) -> Model:
    """The whole model of a run, cut by the mesh's tensor axis, with its initial values (or memory only)."""
    return Model(ModelPlan(config, mesh or Mesh.single(), device, dtype, values))
