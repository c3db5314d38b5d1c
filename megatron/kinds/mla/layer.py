"""Multi-head latent attention (DeepSeek-V2, 2024), cut over tensor parallel ranks by heads.

    c = norm(down_kv x)           keys without positions and values of every head: up_kv c
    q = up_q norm(down_q x)       or of x itself
    r = turn(down_r x)            keys with positions, the same for all heads

Shapes: B samples, S positions, H hidden, n heads of this rank, R kv_rank, P rope_dim, N nope_dim, V value_dim. A head's
queries and keys have their P turned channels first, then the others."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.attention.attend import LONG
from megatron.kinds.common.attention.attend_across import attend_in
from megatron.kinds.common.attention.context_messages import attention_messages
from megatron.kinds.common.attention.entropy import AttentionEntropy
from megatron.kinds.common.attention.key_value_cache import Keys, KeyValueCache
from megatron.kinds.common.attention.paged_keys import PagedKeys
from megatron.kinds.common.attention.pattern import Dropped, Pattern
from megatron.kinds.common.attention.spread_keys import SpreadKeys
from megatron.kinds.mla.options import MLAOptions
from megatron.model.costs.exchanges import Around, LayerMessage
from megatron.model.counts import Counts
from megatron.model.initialisation import Initialisation
from megatron.model.logit_clip import LogitClip, Projection, largest_logits
from megatron.model.norm import Norm
from megatron.model.rotary import Rotary, stream_angles
from megatron.model.stream import Stream
from megatron.parallel.layers.collectives import enter, split_channels
from megatron.parallel.layers.linear import ColumnLinear, RowLinear
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.random import site_key

from ...model.costs.traffic import (
    Enter,
    Event,
    Shared,
    TensorAxis,
    column_events,
    gathered_gradients,
    row_events,
    whole_events,
)


class MLA(nn.Module):
    """x [B, s, H] to its attention output [B, s, H].

    Every tensor parallel rank computes the compressed vectors of all tokens, and from them the queries, keys and values
    of its heads. With columns, a rank multiplies its channels of the compressed vectors, as it does with the stream's.
    """

    def __init__(self, make: ParameterFactory, model: ModelSection, options: MLAOptions, init: Initialisation):
        super().__init__()
        mesh, H = make.mesh, model.hidden_size
        self.mesh, self.context, self.options = mesh, make.context, options
        self.heads = options.heads // mesh.tensor.size
        self.first_head = self.heads * mesh.tensor.rank
        key_width, both = options.nope_dim + options.rope_dim, options.nope_dim + options.value_dim
        norm = model.norm.model_copy(update={"type": "rmsnorm", "epsilon": options.norm_epsilon, "unit_offset": False})

        def down(name: str, width: int) -> ColumnLinear:
            return ColumnLinear(
                make.scope(name), H, (width,), init=init.hidden(H, width), bias=options.bias, shard=False
            )

        def up(name: str, inputs: int, channels: int) -> ColumnLinear:
            outputs = options.heads * channels
            return ColumnLinear(make.scope(name), inputs, (outputs,), init=init.hidden(inputs, outputs), unit=channels)

        self.query_down = self.query_norm = None
        if options.query_rank is not None:
            self.query_down = down("query_down", options.query_rank)
            self.query_norm = Norm(make.scope("query_norm"), options.query_rank, norm, partial=True, stream=False)
        self.query = up("query", options.query_rank or H, key_width)
        self.kv_down = down("kv_down", options.kv_rank + options.rope_dim)
        self.kv_norm = Norm(make.scope("kv_norm"), options.kv_rank, norm, partial=True, stream=False)
        self.key_value = up("key_value", options.kv_rank, both)
        width = options.heads * options.value_dim
        self.output = RowLinear(
            make.scope("output"), width, H, init=init.output(width, H), bias=options.bias, unit=options.value_dim
        )
        self.rotary = Rotary(options.rotary, options.rope_dim) if options.position == "rotary" else None
        plain = Pattern(options.scale * init.factors.attention(options.nope_dim + options.rope_dim))
        self.pattern = plain.computed_by(model.fused_attention)
        self.entropy = AttentionEntropy()
        self.logit_clip = None
        if options.qk_clip is not None:
            # Kimi K2's shares (arXiv 2507.20534, section 2.1): all heads share the turned keys, so only queries shrink
            # their part of a logit.
            queries = Projection(self.query.weight, ((options.rope_dim, 1.0), (options.nope_dim, 0.5)))
            keys = Projection(self.key_value.weight, ((options.nope_dim, 0.5), (options.value_dim, 0.0)))
            self.logit_clip = LogitClip(options.qk_clip, self.heads, [queries, keys], make.device)
        self.dropout_key = site_key(make.seed, make.prefix, "probabilities")

    def forward(self, x: Tensor, stream: Stream, cache: Keys | None = None) -> Tensor:
        x_BSH, begin = enter(x, self.mesh), cache.length if cache is not None else 0
        q, latent, turned, *_ = self._vectors(x_BSH, stream, begin)
        elsewhere, among = cache, isinstance(cache, SpreadKeys | PagedKeys)
        if isinstance(cache, KeyValueCache):
            elsewhere, (latent, turned), among = None, cache.append(latent, turned), begin > 0
        if among:
            y = self._among_latents(q, latent, turned, lambda q, k, v: self._attend(q, k, v, stream, elsewhere))
        else:
            k, v = self._expanded(latent, turned)
            if self.logit_clip is not None and self.training and cache is None:
                self.logit_clip.see(largest_logits(q, k, self.pattern.scale, documents_BS=stream.documents))
            if self.entropy.active and self.training and cache is None:
                self.entropy.see(q, k, self.pattern, stream, self.context)
            y = self._attend(q, k, v, stream, elsewhere)
        return self.output(y.transpose(1, 2).reshape(*x_BSH.shape[:2], -1))

    def _vectors(
        self, x_BSH: Tensor, stream: Stream, begin: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """Queries [B, n, S, P + N], compressed vectors [B, 1, S, R], keys with positions [B, 1, S, P], the queries'
        input, and the angles by which positions turn."""
        inputs, angles = x_BSH, None
        if self.query_down is not None and self.query_norm is not None:
            inputs = self.query_norm(self.query_down(x_BSH))
        own = inputs if self.query_down is None else split_channels(inputs, self.mesh.columns)
        q = self.query(own).unflatten(-1, (self.heads, -1))
        latent, turned = self.kv_down(x_BSH).split([self.options.kv_rank, self.options.rope_dim], -1)
        latent, turned = self.kv_norm(latent).unsqueeze(1), turned.unsqueeze(2)  # [B, 1, S, R], [B, S, 1, P]
        if self.rotary is not None:
            angles = stream_angles(self.rotary, self.options.rope_dim, stream, begin, x_BSH, self.context.size)
            q, turned = self.rotary.turn(q, angles), self.rotary.turn(turned, angles)
        return q.transpose(1, 2), latent, turned.transpose(1, 2), inputs, angles

    def new_state(self) -> KeyValueCache:
        """Cache of the compressed vectors as keys and the turned keys as values, [B, 1, S, R or P]."""
        return KeyValueCache()

    def _expanded(self, latent: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [B, n, S, P + N] and values [B, n, S, V] of every head."""
        own = split_channels(latent.squeeze(1), self.mesh.columns)
        both = self.key_value(own).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = both.split([self.options.nope_dim, self.options.value_dim], -1)
        return torch.cat([turned.expand(-1, self.heads, -1, -1), k], -1), v

    def _among_latents(
        self, q: Tensor, latent: Tensor, turned: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """The same attention, by `attend`, without the keys and values of earlier tokens.

        up_kv is applied to the new tokens' queries and results instead, so that a step of decoding reads R + P numbers
        per token and not n (P + N + V)."""
        matrix = self.key_value.matrix().unflatten(0, (self.heads, -1))
        for_keys, for_values = matrix.split([self.options.nope_dim, self.options.value_dim], 1)  # [n, N or V, R]
        own_turned, own = q.split([self.options.rope_dim, self.options.nope_dim], -1)
        q = torch.cat([own_turned, _by_head(own, for_keys)], -1)
        y = attend(q, torch.cat([turned, latent], -1), latent)
        return _by_head(y, for_values.transpose(1, 2))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, stream: Stream, elsewhere: Keys | None = None) -> Tensor:
        dropout = None
        if self.training and self.options.dropout > 0.0:
            dropout = Dropped(self.options.dropout, self.dropout_key, stream.sample_numbers, self.first_head)
        return attend_in(self.context, q, k, v, self.pattern, stream, dropout, elsewhere=elsewhere)

    @staticmethod
    def sends(model: ModelSection, options: MLAOptions, tensor: TensorAxis) -> list[Event]:
        H, R, rank, heads = model.hidden_size, options.kv_rank, options.query_rank, options.heads // tensor.ranks
        turned, value = options.rope_dim, options.value_dim
        queries = [*whole_events(rank, H, options.bias), Shared(rank)] if rank else []
        latents = [*whole_events(R + turned, H, options.bias), Shared(R)]
        latents += column_events(tensor, R + turned, heads * (options.nope_dim + turned))
        latents += [*column_events(tensor, heads * (options.nope_dim + value)), *gathered_gradients(tensor, R)]
        latents += [*column_events(tensor, rank), *gathered_gradients(tensor, rank)] if rank else []
        return [Enter(H), *queries, *latents, *row_events(H, options.bias, tensor, options.heads * value)]

    @staticmethod
    def exchanges(model: ModelSection, options: MLAOptions, around: Around) -> list[LayerMessage]:
        heads = options.heads // around.tensor
        return attention_messages(around, heads, heads, options.nope_dim + options.rope_dim, options.value_dim, None)

    @staticmethod
    def counts(model: ModelSection, options: MLAOptions, sequence_length: int) -> Counts:
        H, n, R, P = model.hidden_size, options.heads, options.kv_rank, options.rope_dim
        key_width, both = options.nope_dim + P, options.nope_dim + options.value_dim
        queries, rank = n * key_width, options.query_rank or 0
        matrices = (H * rank + rank * queries) if rank else H * queries
        matrices += H * (R + P) + R * n * both + n * options.value_dim * H
        biases = (rank + R + P + H) if options.bias else 0
        products = rank + queries + R + P + n * both + n * options.value_dim + n  # the last: log-sum-exp
        saved = products + n * key_width  # keys, which are put together
        saved += (rank + 1 if rank else 0) + R + 1  # normed vectors and their scales
        if options.dropout > 0.0 and sequence_length <= LONG:
            saved += 3 * n * sequence_length  # attention written out: probabilities and dropout
        return Counts(
            parameters=matrices + biases + rank + R,
            flops=2 * matrices + 2 * sequence_length * n * (key_width + options.value_dim),
            activations=saved,
            products=products + H,
            state=(R + P) * sequence_length,
        )


def _by_head(x_BnSA: Tensor, matrix_nAC: Tensor) -> Tensor:
    """[B, n, S, C], each head's rows of all samples in one product."""
    rows = x_BnSA.transpose(0, 1).flatten(1, 2) @ matrix_nAC
    return rows.unflatten(1, (x_BnSA.shape[0], -1)).transpose(0, 1)
