"""Attention and MLP whose weights several layers share (Zamba, Glorioso et al. 2024a, Zamba2, 2024b).

    s = [x | x0]                      x0 the embedding, so s has 2H channels
    T = output(mlp(norm(attention(norm(s)))))            no residual inside
    x <- x + mixer(norm(x + T))       the block's own mixer, such as mamba2

Calls use `blocks` sets of shared weights in turn. Each call has its own output matrix [H, H]. With `adapter_rank` it
has its own low-rank additions to the MLP's first matrix and to queries, keys and values (LoRA, Hu et al. 2021).

Shapes: B samples, s positions of this rank, S positions, H hidden."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron.config.pattern import Kind
from megatron.config.sections.model import ModelSection
from megatron.kinds.attention.layer import Attention, SharedCall
from megatron.kinds.common.attention.key_value_cache import Keys, KeyValueCache
from megatron.kinds.mlp.layer import MLP
from megatron.kinds.shared_attention.options import SharedAttentionOptions
from megatron.model.costs.exchanges import Around, LayerMessage
from megatron.model.costs.traffic import Event, Shared, TensorAxis, norm
from megatron.model.counts import Counts
from megatron.model.initialisation import Initialisation
from megatron.model.norm import Norm, norm_activations, norm_parameters
from megatron.model.stream import EMBEDDING, Channel, Stream
from megatron.parallel.layers.linear import ColumnLinear, WholeLinear
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.random import site_key


class Adapter(nn.Module):
    """up(down(x)), inside a tensor region: [B, S, inputs] to this rank's slice of the outputs.

    Args:
        parts, unit, shard: of the `ColumnLinear` whose result it is added to.
    """

    def __init__(
        self,
        make: ParameterFactory,
        inputs: int,
        rank: int,
        parts: tuple[int, ...],
        init: Initialisation,
        *,
        unit: int = 1,
        shard: bool = True,
    ):
        super().__init__()
        self.down = ColumnLinear(make.scope("down"), inputs, (rank,), init=init.hidden(inputs, rank), shard=False)
        self.up = ColumnLinear(make.scope("up"), rank, parts, init=init.hidden(rank, parts[0]), unit=unit, shard=shard)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


class SharedBlock(nn.Module):
    """The weights that calls share: [x | x0], [B, s, 2H], to [B, s, H]."""

    def __init__(
        self, make: ParameterFactory, model: ModelSection, options: SharedAttentionOptions, init: Initialisation
    ):
        super().__init__()
        H, partial = model.hidden_size, make.mesh.layout.sequence
        self.norm = Norm(make.scope("norm"), 2 * H, model.norm, partial=partial)
        self.attention = Attention(make.scope("attention"), model, options, init, inputs=2 * H)
        self.ffn_norm = Norm(make.scope("ffn_norm"), H, model.norm, partial=partial)
        self.mlp = MLP(make.scope("mlp"), model, options.mlp, init)

    def forward(
        self, x_Bs2H: Tensor, stream: Stream, cache: Keys | None, call: SharedCall, adapter: Adapter | None
    ) -> Tensor:
        y = self.attention(self.norm(x_Bs2H), stream, cache, call)
        return self.mlp(self.ffn_norm(y), stream, adapter=adapter)


class SharedAttention(nn.Module):
    """One call: x [B, s, H] to T [B, s, H].

    The first call of a shared block on this rank owns its module, so that each parameter has one place in the model.
    Later calls borrow it.

    Args:
        number: which call of its kind this is in the whole model.
        shared: the shared blocks of this rank so far, by logical name.
    """

    new_state = KeyValueCache

    def __init__(
        self,
        make: ParameterFactory,
        model: ModelSection,
        kind: Kind,
        options: SharedAttentionOptions,
        init: Initialisation,
        number: int,
        shared: dict[str, SharedBlock],
    ):
        super().__init__()
        H, D, rank = model.hidden_size, options.head_dim, options.adapter_rank
        name, self.owned = self.shared_name(kind, options, number), None
        if name not in shared:
            self.owned = shared[name] = SharedBlock(replace(make, prefix=name), model, options, init)
        self.borrowed = (shared[name],)  # a tuple, so that it does not become a submodule
        self.mlp_adapter = self.adapters = None
        if rank:
            parts = (2 if options.mlp.gated else 1) * (options.mlp.hidden_size,)
            self.mlp_adapter = Adapter(make.scope("mlp_adapter"), H, rank, parts, init)
        if rank and options.attention_adapters:
            split_kv = options.kv_heads % make.mesh.tensor.size == 0
            self.adapters = nn.ModuleList(
                Adapter(make.scope(f"{each}_adapter"), 2 * H, rank, (heads * D,), init, unit=D, shard=shard)
                for each, heads, shard in (
                    ("query", options.heads, True),
                    ("key", options.kv_heads, split_kv),
                    ("value", options.kv_heads, split_kv),
                )
            )
        self.output = WholeLinear(make.scope("output"), H, H, init=init.output(H, H))
        self.dropout_key = site_key(make.seed, make.prefix, "probabilities")

    def forward(self, x: Tensor, stream: Stream, cache: Keys | None = None) -> Tensor:
        both = torch.cat([x, stream.channels[EMBEDDING]], -1)
        adapters = None
        if self.adapters is not None:
            query, key, value = self.adapters
            adapters = query, key, value
        call = SharedCall(self.dropout_key, adapters)
        return self.output(self.borrowed[0](both, stream, cache, call, self.mlp_adapter))

    @staticmethod
    def channels(model: ModelSection, options: SharedAttentionOptions, ranks: int) -> dict[str, Channel]:
        return {EMBEDDING: Channel(model.hidden_size, embedded=True)}

    @staticmethod
    def sends(model: ModelSection, options: SharedAttentionOptions, tensor: TensorAxis) -> list[Event]:
        H, D, rank, cut = model.hidden_size, options.head_dim, options.adapter_rank, tensor.sequence
        adapters = [Shared(rank * H)] if rank else []
        if rank and options.attention_adapters:
            adapters += 3 * [Shared(rank * 2 * H)]
            adapters += [] if options.kv_heads % tensor.ranks == 0 else 2 * [Shared(options.kv_heads * D * rank)]
        return [
            *norm(model.norm, 2 * H, cut),
            *Attention.sends(model, options, tensor, 2 * H),
            *norm(model.norm, H, cut),
            *MLP.sends(model, options.mlp, tensor),
            *adapters,
            *([Shared(H * H)] if cut else []),
        ]

    @staticmethod
    def exchanges(model: ModelSection, options: SharedAttentionOptions, around: Around) -> list[LayerMessage]:
        return Attention.exchanges(model, options, around)

    @staticmethod
    def counts(model: ModelSection, options: SharedAttentionOptions, sequence_length: int, number: int = 0) -> Counts:
        """The shared weights are counted at the first call of each, their work at every call."""
        H, R, mlp = model.hidden_size, options.adapter_rank, options.mlp
        shared = Attention.counts(model, options, sequence_length, inputs=2 * H) + MLP.counts(
            model, mlp, sequence_length
        )
        norms = Counts(
            norm_parameters(model.norm, 2 * H) + norm_parameters(model.norm, H),
            activations=norm_activations(model.norm, 2 * H) + norm_activations(model.norm, H) + 3 * H,
        )  # read by layers
        shared += norms
        if number >= options.blocks:
            shared = replace(shared, parameters=0)
        widths = [(H, (2 if mlp.gated else 1) * mlp.hidden_size)] if R else []
        if R and options.attention_adapters:
            heads = (options.heads, options.kv_heads, options.kv_heads)
            widths += [(2 * H, each * options.head_dim) for each in heads]
        own = sum(R * (inputs + outputs) for inputs, outputs in widths) + H * H
        return shared + Counts(
            own, flops=2 * own, activations=R * len(widths) + H, products=sum(R + outputs for _, outputs in widths) + H
        )

    @staticmethod
    def shared_name(kind: Kind, options: SharedAttentionOptions, number: int) -> str:
        """Prefix of the logical names of the shared block that the call of this number uses."""
        family = f"{kind.name}.{kind.variant}" if kind.variant else kind.name
        return f"{family}.{number % options.blocks}"
