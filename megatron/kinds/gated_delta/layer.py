"""Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024), cut over tensor parallel ranks by heads.

With decays by channel it is Kimi delta attention (Kimi Team 2025), with several updates per token Gated DeltaProduct.

Shapes: B samples, S positions, H hidden, h heads of values with V channels, g heads of queries and keys with K channels
(g divides h). Heads are of this rank unless said otherwise."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.attention.context_messages import scan_messages
from megatron.kinds.common.recurrence.convolution import CONVOLUTIONS, Taps
from megatron.kinds.common.recurrence.decays import PIECE
from megatron.kinds.common.recurrence.recomputed import recomputed
from megatron.kinds.gated_delta.options import KIND, GatedDeltaOptions
from megatron.model.costs.exchanges import Around, LayerMessage
from megatron.model.costs.traffic import Enter, Event, Shared, TensorAxis, column_events, row_events, whole_events
from megatron.model.counts import Counts
from megatron.model.initialisation import Initialisation
from megatron.model.kernels.choice import choose_kernels
from megatron.model.norm import rms_norm
from megatron.model.stream import Stream
from megatron.parallel.layers.collectives import enter, sum_gradient
from megatron.parallel.layers.linear import ColumnLinear, RowLinear
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.initial import ONES, Init, time_steps
from megatron.parallel.layout.precision import at_least_fp32
from megatron.parallel.layout.shard import Role, Shard

from ..common.recurrence.sequence_scan import carried_by_matrix, document_begins, last_document, taps_after, taps_before
from . import kernels
from .delta_rule import ends, gated_delta_rule
from .householders import read, steps

LEAST_RATE = 1e-4  # initial decay rates are no smaller, so that their logarithms are finite


@dataclass
class GatedDeltaState:
    """State between pieces of a sequence. Gradients may flow through it."""

    # query_key, value: the last taps - 1 inputs of the convolutions, [B, taps - 1, channels]
    query_key: Tensor | None = None
    value: Tensor | None = None
    memory: Tensor | None = None  # [B, h, K, V], fp32
    document: Tensor | None = None  # int [B], document of the last token, where there are documents


class GatedDelta(nn.Module):
    """x [B, s, H] to its output [B, s, H]: output(norm(delta_rule(silu(conv([q k v])))) * activation(gate)).

    Heads of keys are cut over the ranks if their number allows. Otherwise every rank computes all of them and uses the
    heads that its heads of values read."""

    compiled_parts = ("_rates", "_gated_norm")

    new_state = GatedDeltaState

    def __init__(self, make: ParameterFactory, model: ModelSection, options: GatedDeltaOptions, init: Initialisation):
        super().__init__()
        mesh, H, ranks = make.mesh, model.hidden_size, make.mesh.tensor.size
        self.mesh, self.context, self.options = mesh, make.context, options
        self.by_channel = options.decay == "channel"
        self.fused = choose_kernels(model.kernels, KIND, make.device)[0] == "fla"
        heads, K, V = options.heads, options.key_dim, options.value_dim
        keys, values = options.key_heads * K, heads * V
        self.heads = heads // ranks
        first = self.heads * mesh.tensor.rank
        self.shard_keys = options.key_heads % ranks == 0
        self.keys_of_head = [(first + head) * options.key_heads // heads for head in range(self.heads)]
        wide = (1 + options.householders) * (keys,)
        self.query_key = ColumnLinear(
            make.scope("query_key"), H, wide, init=init.hidden(H, keys), unit=K, shard=self.shard_keys
        )
        self._build_projections(make, H, init)
        self.query_key_conv = Taps(make.scope("query_key_conv"), wide, options, shard=self.shard_keys)
        self.value_conv = Taps(make.scope("value_conv"), options.householders * (values,), options)
        self.decays = K if self.by_channel else 1  # of a head

        def per_head(name: str, init: Init, count: int = 1) -> nn.Parameter:
            return make.parameter(name, (heads * count,), role=Role.STATE, init=init, shard=Shard(0), keep_fp32=True)

        self.A_log = per_head(
            "A_log",
            Init(
                "between", options.decay_high, options.decay_low, then=lambda rate: np.log(np.maximum(rate, LEAST_RATE))
            ),
        )
        steps = time_steps(options.time_step_low, options.time_step_high, options.time_step_floor)
        self.dt_bias = per_head("dt_bias", steps, self.decays)
        self.norm = make.parameter("norm.weight", (V,), role=Role.NORM, init=ONES)
        self.output = RowLinear(make.scope("output"), values, H, init=init.output(values, H), unit=V)

    def _build_projections(self, make: ParameterFactory, H: int, init: Initialisation) -> None:
        """Of values, gate, decays and betas: two matrices, or one each where two are of low rank."""
        options = self.options
        heads, values, updates = options.heads, options.heads * options.value_dim, options.householders

        def matrix(
            name: str, inputs: int, parts: tuple[int, ...], unit: int = 1, shard: bool = True, stream: bool = True
        ) -> ColumnLinear:
            start = init.hidden(inputs, parts[0])
            return ColumnLinear(make.scope(name), inputs, parts, init=start, unit=unit, shard=shard, stream=stream)

        if not self.by_channel:
            self.value_gate = matrix("value_gate", H, (updates + 1) * (values,), options.value_dim)
            self.decay_beta = matrix("decay_beta", H, (updates + 1) * (heads,))
            return
        self.value = matrix("value", H, updates * (values,), options.value_dim)
        self.beta = matrix("beta", H, updates * (heads,))
        self.down = matrix("down", H, (options.rank, options.rank), shard=False)
        self.decay = matrix("decay", options.rank, (heads * options.key_dim,), options.key_dim, stream=False)
        self.gate = matrix("gate", options.rank, (values,), options.value_dim, stream=False)

    def _projected(self, x_BSH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Values of all updates, the gate, and decays and betas side by side."""
        if self.by_channel:
            decay, gate = self.down(x_BSH).chunk(2, dim=-1)
            return self.value(x_BSH), self.gate(gate), torch.cat([self.decay(decay), self.beta(x_BSH)], -1)
        own, updates = self.heads * self.options.value_dim, self.options.householders
        value, gate = self.value_gate(x_BSH).split([updates * own, own], -1)
        return value, gate, self.decay_beta(x_BSH)

    def forward(self, x: Tensor, stream: Stream, state: GatedDeltaState | None = None) -> Tensor:
        options, x_BSH = self.options, enter(x, self.mesh)
        query_key = self.query_key(x_BSH)
        value, gate, decay_beta = self._projected(x_BSH)
        decay, beta = recomputed(self._rates, decay_beta, self.A_log, self.dt_bias)
        starts, past = document_begins(stream, state, self.context), state or GatedDeltaState()
        keys_before, values_before = (
            taps_before(self.context, each, old, options.convolution, starts)
            for each, old in ((query_key, past.query_key), (value, past.value))
        )
        fused = self.fused and state is None and self.context.size == 1
        convolve: Callable = CONVOLUTIONS["fla" if fused else "torch"]
        updates = options.householders
        q, *k = convolve(query_key, *self.query_key_conv.taps(), keys_before, starts).chunk(1 + updates, dim=-1)
        v = convolve(value, *self.value_conv.taps(), values_before, starts).chunk(updates, dim=-1)
        q, *k = (self._used_keys(each.unflatten(-1, (-1, options.key_dim))) for each in (q, *k))
        *inputs, begins = steps(q, k, [each.unflatten(-1, (self.heads, -1)) for each in v], decay, beta, starts)
        rule: Callable = kernels.gated_delta_rule if fused else gated_delta_rule
        before = past.memory
        if self.context.size > 1:
            made, left = recomputed(functools.partial(ends, chunk=options.chunk), *inputs[1:], begins)
            before = carried_by_matrix(self.context, made, lambda: left, before)
        y, memory = rule(*inputs, chunk=options.chunk, initial_BhKV=before, starts_BS=begins)
        if state is not None:
            state.query_key, state.value = (
                taps_after(self.context, each, old, options.convolution, starts)
                for each, old in ((query_key, keys_before), (value, values_before))
            )
            state.memory = self.context.to_first(memory)
            state.document = last_document(self.context, stream)
        weight = sum_gradient(self.norm, self.mesh.tensor)  # each rank norms its own heads
        return self.output(recomputed(self._gated_norm, read(y, updates), gate, weight))

    def _used_keys(self, x_BSgK: Tensor) -> Tensor:
        """Heads of queries or keys that this rank's heads of values use, each by the same number."""
        if self.shard_keys:
            return x_BSgK
        if len(set(self.keys_of_head)) == 1:
            return x_BSgK[:, :, self.keys_of_head[:1]]
        return x_BSgK[:, :, self.keys_of_head]

    def _rates(self, decay_beta: Tensor, A_log_h: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithms of decays [B, S, h] or [B, S, h, K], and betas [B, S, h] of each update, fp32."""
        first = len(dt_bias)
        decay, beta = at_least_fp32(decay_beta).split([first, decay_beta.shape[-1] - first], -1)
        beta = beta.sigmoid() * (2.0 if self.options.negative_eigenvalues else 1.0)
        rates, pace = -A_log_h.exp(), F.softplus(decay + dt_bias)
        return rates.unsqueeze(-1) * pace.unflatten(-1, (-1, self.decays)) if self.by_channel else rates * pace, beta

    def _gated_norm(self, y_BShV: Tensor, gate_BSd: Tensor, weight_V: Tensor) -> Tensor:
        """RMSNorm of each head, times its gate, [B, S, h V]."""
        y, weight = at_least_fp32(y_BShV), at_least_fp32(weight_V)
        y = rms_norm(y, weight, self.options.norm_epsilon).flatten(2, 3)
        gate = at_least_fp32(gate_BSd)
        return (y * (F.silu(gate) if self.options.gate == "silu" else gate.sigmoid())).to(gate_BSd.dtype)

    @staticmethod
    def sends(model: ModelSection, options: GatedDeltaOptions, tensor: TensorAxis) -> list[Event]:
        H, keys = model.hidden_size, (1 + options.householders) * options.key_heads * options.key_dim
        uncut: list[Event] = []
        if options.key_heads % tensor.ranks:
            uncut = [*whole_events(keys, H), Shared(keys * options.convolution)]
            uncut += [Shared(keys)] if options.convolution_bias else []
        uncut += whole_events(2 * options.rank, H) if options.decay == "channel" else []
        values, updates, ranks = options.heads * options.value_dim, options.householders, tensor.ranks
        low = options.decay == "channel"  # its gate and decays read the low rank, not the stream
        widths = (updates + (not low)) * values // ranks, (updates + (not low)) * options.heads // ranks
        keys //= 1 if options.key_heads % ranks else ranks
        products = column_events(tensor, keys, *widths, *([2 * options.rank] if low else []))
        return [Enter(H), *uncut, *products, Shared(options.value_dim), *row_events(H, False, tensor, values)]

    @staticmethod
    def exchanges(model: ModelSection, options: GatedDeltaOptions, around: Around) -> list[LayerMessage]:
        ranks, taps, h = around.tensor, options.convolution - 1, options.heads // around.tensor
        updates, keys = options.householders, options.key_heads * options.key_dim
        keys = (1 + updates) * keys // (1 if options.key_heads % ranks else ranks)
        made, left = (h * options.key_dim * width for width in (options.value_dim, options.key_dim))
        return scan_messages(around, taps * keys, taps * updates * h * options.value_dim, made=made, left=left)

    @staticmethod
    def counts(model: ModelSection, options: GatedDeltaOptions, sequence_length: int) -> Counts:
        H, taps, h, n = model.hidden_size, options.convolution, options.heads, options.householders
        keys, values, width = options.key_heads * options.key_dim, h * options.value_dim, options.key_dim
        chunk, state = min(options.chunk, sequence_length), h * width * options.value_dim
        convolved, rates, low = (1 + n) * keys + n * values, h, 0
        # Products with keys inside chunks, of keys and of queries: of matrices, or of matrices between pieces only.
        overlaps = 2 * chunk * options.key_heads
        if options.decay == "channel":
            rates, low, overlaps = h * width, 2 * options.rank, max(chunk - PIECE, 0) * h
        made = convolved + values + rates + n * h
        projections = H * made if not low else H * (convolved + low + n * h) + options.rank * (rates + values)
        # Inside chunks: products with keys, the triangular system, scores with n. Between them: with the state.
        rule = overlaps * width + chunk * (h * (width + options.value_dim) + values) + 3 * state
        return Counts(
            parameters=projections
            + values * H
            + (taps + options.convolution_bias) * convolved
            + h
            + rates
            + options.value_dim,
            flops=2 * (projections + values * H + taps * convolved + n * rule),
            # projections, then queries and keys of each update, values, rates, what is read, and its norm
            activations=made + low + n * (2 * keys + values) + n * (rates + h) + 2 * values,
            products=made + low + H + n * (overlaps + 3 * values + state // chunk),
            state=state + (taps - 1) * convolved,
            memory=state,
        )
