"""The whole model as a list of layers, and the part of it that one pipeline stage holds."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron.config import Config
from megatron.config.arithmetic.recurrence import core_of
from megatron.config.features.feature import wanted_features
from megatron.config.pattern import BlockPattern
from megatron.config.registry import load
from megatron.config.variants import options_of
from megatron.objectives.named import objective_of
from megatron.parallel.layers.ahead import gather_ahead
from megatron.parallel.layers.async_tensor import check_async_tensor
from megatron.parallel.layers.context import ContextGroup
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.mesh import ALONE, Axis, Mesh
from megatron.parallel.layout.precision import COMPUTE_TYPES

from .block import Block, block_channels
from .chunks import Chunks, embed_in_chunks, mapped, work_in_chunks
from .embedding_and_head import Embedding, Head, Reader, Taught, final_norm, token_embedding
from .initialisation import Initialisation
from .kernels.choice import use_flash_attention
from .kernels.compile import begin_pass, compile_forward, graphs
from .multi_token import FurtherLabels, FurtherToken, MultiTokenPrediction
from .norm import Norm
from .options import kind_of
from .parametrization import Parametrization
from .recompute import recompute_activations
from .recurrent_depth import Core, Depth, InitialState
from .stream import COLUMNS, Channel, Stream, StreamForm, live_channels


@dataclass(frozen=True)
class ModelPlan:
    """Builds any layer of a run's model. The list of layers is embedding, blocks, head."""

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

    @cached_property
    def further(self) -> tuple[BlockPattern, ...]:
        """The blocks of the modules that predict further tokens, numbered after `blocks`."""
        return self.config.model.further_blocks

    @cached_property
    def inside(self) -> range:
        """The indices of the recurrent core's blocks. Empty without one."""
        return core_of(self.blocks)

    @cached_property
    def depth(self) -> Depth | None:
        """Number of passes through the core. None without one."""
        return Depth(self.config.model.recurrence, self.config.training.seed) if self.inside else None

    def core(self, blocks: Iterable[Block], norm: Norm) -> Core | None:
        """The core of these blocks.

        Args:
            norm: with the weights of the norm before the head.
        """
        if self.depth is None:
            return None
        options, make = self.config.model.recurrence, self.factory("")
        return Core(self.depth, list(blocks), InitialState(make, options), norm if options.norm == "head" else None)

    def factory(self, prefix: str, factors: Parametrization | None = None) -> ParameterFactory:
        dtype, scales = self.dtype or COMPUTE_TYPES[self.config.precision.compute], (factors or self.factors).scales
        return ParameterFactory(self.mesh, self.config.training.seed, self.device, dtype, prefix, self.values, scales)

    @property
    def whole(self) -> str:
        """Import path of the class, where a kind is the whole model. Else ""."""
        first = self.blocks[0].kinds
        return kind_of(self.config.model, first[0]).whole if first else ""

    @property
    def context(self) -> ContextGroup:
        """The ranks that share each sample's tokens with this one."""
        return ContextGroup.of(self.mesh, self.chunks.tokens)

    @cached_property
    def live_channels(self) -> list[dict[str, Channel]]:
        """The float side channels of the stream before each block and before the head."""
        model, ranks = self.config.model, self.mesh.of_blocks.tensor.size
        return live_channels([block_channels(model, block, ranks, index) for index, block in enumerate(self.blocks)])

    @property
    def width(self) -> int:
        """Channels of the residual stream on this rank."""
        return self.config.model.hidden_size // self.mesh.layout.columns

    @property
    def stream_dtype(self) -> torch.dtype:
        """Of the residual stream."""
        return (
            torch.float32
            if self.config.model.residual.fp32
            else self.dtype or COMPUTE_TYPES[self.config.precision.compute]
        )

    def form_at(self, index: int) -> StreamForm:
        """The form of the stream before the block of this index (or, after the last, before the head)."""
        return replace(self.form, channels=self.live_channels[index])

    @property
    def form(self) -> StreamForm:
        """The side channels that all of this run's streams have."""
        model, data = self.config.model, self.config.data
        kinds = {each for block in (*self.blocks, *self.further) for each in block.kinds}
        draws = any(kind_of(model, each).draws(options_of(model, each)) for each in kinds) or bool(self.inside)
        draws = draws or any(feature.draws(self.config) for feature in wanted_features(self.config).values())
        documents, shared = data.reset_attention_at_eod, self.mesh.context.size > 1
        return StreamForm(positions=documents or shared, documents=documents, samples=draws or model.dropout > 0.0)

    @cached_property
    def chunks(self) -> Chunks:
        """How layers cut sequences."""
        return Chunks.of(self.config)

    def embedding(self) -> Embedding:
        embedding = Embedding(self.factory("embedding"), self.config.model, self.init, tuple(self.live_channels[0]))
        embed_in_chunks(embedding, self.chunks)
        return embedding

    def block(self, index: int, shared: dict[str, nn.Module] | None = None) -> Block:
        """The block of this number.

        Args:
            shared: modules that the blocks of one rank share (see `Block`).
        """
        use_flash_attention(self.config.model.fused_attention.flash, self.device)
        if self.mesh.layout.async_tensor:
            check_async_tensor(self.mesh.tensor, self.device)
        make = replace(
            self.factory(f"layers.{index}", self.factors.in_block), products=self.config.precision.products
        ).of_stream
        block = Block(make, self.config.model, (*self.blocks, *self.further)[index], self.init.at(index), shared)
        compile_forward(block, self.config, self.device)
        recompute = self.config.training.activation_checkpointing
        if self.mesh.depth.size > 1:
            gather_ahead(block, again=recompute.mode != "selective")
        if self.chunks.tokens:
            work_in_chunks(block, self.chunks)
        else:
            recompute_activations(block, index, recompute)
        return block

    def head_norm(self) -> Norm:
        return self._output_norm(self.factory("").of_stream.scope("final_norm"))

    def _output_norm(self, make: ParameterFactory) -> Norm:
        model, partial = self.config.model, self.mesh.layout.sequence
        return Norm(make, model.hidden_size, final_norm(model), partial=partial)

    @property
    def head_embeds(self) -> bool:
        """Whether the head's stage has the token embedding too."""
        tied = self.config.model.embedding.tied and not objective_of(self.config).scores
        return tied or bool(self.further)

    def tokens(self) -> nn.Parameter:
        """The weights of the token embedding, for a stage that has no embedding layer."""
        return token_embedding(self.factory("embedding"), self.config.model, self.init).weight

    def head(self, tokens: nn.Parameter | None = None, norm: Norm | None = None) -> Head:
        """The last layer.

        Args:
            tokens: this rank's weights of the token embedding, where the head's stage has them (`head_embeds`).
            norm: of this rank, where another layer uses it too.
        """
        config, make = self.config, self.factory("")
        own, tied = norm or self.head_norm(), tokens if config.model.embedding.tied else None
        further = self.multi_token(tokens) if self.further and tokens is not None else None
        objective = objective_of(config)
        return Head(make, config.model, config.training, self.init, objective, own, tied, self.chunks, further)

    def multi_token(self, tokens: nn.Parameter) -> MultiTokenPrediction:
        """The modules that predict further tokens, with these weights of the token embedding."""
        model, modules = self.config.model, []
        for index in range(len(self.blocks), len(self.blocks) + len(self.further)):
            make = self.factory(f"layers.{index}", self.factors.in_block)
            output = self._output_norm(make.scope("output_norm"))
            modules.append(FurtherToken(make, model, self.init.at(index), self.block(index), output))
        table = token_embedding(self.factory("embedding"), model, self.init, tokens)
        return MultiTokenPrediction(modules, table, model)


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
        self.head = plan.head(self.embedding.tokens.weight if plan.head_embeds else None)
        self.core = plan.core(list(self.blocks)[plan.inside.start : plan.inside.stop], self.head.norm)

    @property
    def longest(self) -> int | None:
        """Tokens of the longest text. None: any number."""
        embedding = self.plan.config.model.embedding
        return embedding.max_positions if embedding.position == "learned" else None

    def _run(self, stream: Stream, states: list[Any] | None = None, begin: int | Tensor = 0) -> Stream:
        """The blocks, with their decoding states. The states of a core are at the place of its first block."""
        inside = self.plan.inside
        for index, block in enumerate(self.blocks):
            own = None if states is None else states[index]
            if index not in inside:
                stream = block(stream, own)
            elif index == inside.start and self.core is not None:
                stream = self.core(stream, own, begin)
        return stream

    def stream(
        self,
        tokens_BS: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        samples: Tensor | None = None,
    ) -> Stream:
        return self._stream(None, tokens_BS, positions, documents, samples)

    def _stream(self, columns: Mapping[str, Tensor] | None, *given: Tensor | None) -> Stream:
        if graphs(self.plan.config, self.plan.device):
            begin_pass()
        stream = self.embedding(*given)
        if columns:
            stream.memo[COLUMNS] = columns
        return self._run(stream)

    def forward(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor,
        weights_BS: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        samples: Tensor | None = None,
        reader: Reader | None = None,
        further: FurtherLabels | None = None,
        teacher: Taught | None = None,
        columns: Mapping[str, Tensor] | None = None,
        state: list[Any] | None = None,
        begin: int | Tensor = 0,
    ) -> Any:
        """(weighted sum of token losses, each token's cross-entropy [B, S]), as `Head.forward`.

        With a `state` the tokens follow the `begin` ones that it has read, and it grows by them.

        Args:
            begin: a tensor [B, 1] has the position of each row's only token, where the rows are of different texts.
        """
        if state is None:
            stream = self._stream(columns, tokens_BS, positions, documents, samples)
        else:
            stream = self._run(self.continued(tokens_BS, begin), state, begin)
        return self.head(stream, labels_BS, weights_BS, reader, further, teacher, columns)

    def continued(self, tokens_BS: Tensor, begin: int | Tensor) -> Stream:
        """The embedding of tokens that follow earlier ones. `begin` as in `forward`."""
        if isinstance(begin, Tensor):
            return self.embedding(tokens_BS, positions=begin)
        return self.embedding(tokens_BS, begin=begin)

    def logits(self, tokens_BS: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """fp32 logits [B, S, V]."""
        return self.head.logits(self.stream(tokens_BS, positions, documents))

    def new_state(self, axis: Axis = ALONE) -> list[Any]:
        """Empty decoding state, one entry per block. The entry of a core's first block has all of the core's, per pass.

        The ranks of `axis` share the keys of one text."""
        states: list[Any] = [block.new_state() for block in self.blocks]
        if self.core is not None:
            states[self.plan.inside.start] = self.core.new_state()
        if axis.size == 1:
            return states
        return [mapped(each, lambda part: part.over(axis) if hasattr(part, "over") else None) for each in states]

    def decode(self, tokens_BS: Tensor, state: list[Any], begin: int) -> Tensor:
        """Logits [B, S, V] of tokens that follow the `begin` tokens in `state`, which grows by them."""
        return self.head.logits(self._run(self.continued(tokens_BS, begin), state, begin))


def build_model(
    config: Config,
    mesh: Mesh | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    values: bool = True,
) -> Model:
    """The whole model of a run, cut by the mesh's tensor axis, with its initial values (or memory only)."""
    return make_model(ModelPlan(config, mesh or Mesh.single(), device, dtype, values))


def make_model(plan: ModelPlan, on_host: bool = False) -> Model:
    """The model of a plan: a list of layers, or the class of a kind that is a whole model.

    Args:
        on_host: parameters of such a class stay on the host.
    """
    return cast(Model, load(plan.whole)(plan, on_host)) if plan.whole else Model(plan)
