"""Compressed convolutional attention (Figliolia et al. 2025, arXiv 2510.04476), cut over tensor parallel ranks by
key/value heads.

Shapes: B samples, S positions, H hidden, n query heads, m key/value heads, D head_dim, C = (n + m) D compressed
channels of queries and keys. Heads are of this rank unless said otherwise."""

import math
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.sections.model import ModelSection
from megatron.kinds.cca.options import CCAOptions
from megatron.kinds.common.attention.attend_across import attend_in
from megatron.kinds.common.attention.context_messages import attention_messages, scan_messages
from megatron.kinds.common.attention.entropy import AttentionEntropy
from megatron.kinds.common.attention.key_value_cache import Keys, KeyValueCache
from megatron.kinds.common.attention.pattern import Pattern
from megatron.kinds.common.recurrence.convolution import with_past
from megatron.kinds.common.recurrence.pieces import piece_starts, shared_starts
from megatron.kinds.common.recurrence.recomputed import recomputed
from megatron.kinds.common.recurrence.sequence_scan import taps_after, taps_before, token_before
from megatron.model.costs.exchanges import Around, LayerMessage
from megatron.model.costs.traffic import Enter, Event, TensorAxis, column_events, row_events
from megatron.model.counts import Counts
from megatron.model.initialisation import Initialisation
from megatron.model.rotary import Rotary, stream_angles
from megatron.model.stream import Stream
from megatron.parallel.layers.collectives import enter
from megatron.parallel.layers.linear import ColumnLinear, RowLinear
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.initial import ONES, ZEROS, Init
from megatron.parallel.layout.precision import at_least_fp32
from megatron.parallel.layout.shard import Growth, Role, Shard


@dataclass
class CCAState:
    """State between pieces of a sequence. Gradients may flow through it."""

    cache: Keys = field(default_factory=KeyValueCache)  # compressed keys and values
    query_key: Tensor | None = None  # [B, taps, C], the last inputs of the two convolutions
    value: Tensor | None = None  # [B, 1, delayed channels] of the last token, for the next
    # Int [B, length], document of every token so far (of a chunk, of its own), where there are documents
    documents: Tensor | None = None

    @property
    def document(self) -> Tensor | None:
        return None if self.documents is None else self.documents[:, -1]


class Convolution(nn.Module):
    """Weights [outputs, inputs per output, taps] and biases of a convolution along the sequence, started as torch's
    Conv1d.

    Args:
        parts: channels of queries and of keys of all ranks, each cut by heads of `unit` channels.
        grows: whether the inputs per output, a head's channels, grow with the model's width.
    """

    def __init__(
        self, make: ParameterFactory, parts: tuple[int, int], unit: int, inputs: int, taps: int, grows: bool = False
    ):
        super().__init__()
        cut, init = Shard(0, parts, unit), Init("uniform", (inputs * taps) ** -0.5)
        growth = Growth.BOTH if grows else Growth.OUTPUTS
        self.weight = make.parameter(
            "weight", (sum(parts), inputs, taps), role=Role.CONVOLUTION, init=init, shard=cut, growth=growth
        )
        self.bias = make.parameter("bias", (sum(parts),), role=Role.BIAS, init=init, shard=cut)


class CCA(nn.Module):
    """x [B, s, H] to its output [B, s, H]: attention among compressed queries, keys and values.

    Queries and keys go through two short convolutions together, get the mean of both back, and are brought to one
    length. Half of the value channels come from the token before."""

    new_state = CCAState

    def __init__(self, make: ParameterFactory, model: ModelSection, options: CCAOptions, init: Initialisation):
        super().__init__()
        mesh, H, D = make.mesh, model.hidden_size, options.head_dim
        self.mesh, self.context, self.options, self.D = mesh, make.context, options, D
        self.taps = options.depthwise + options.grouped - 1  # tokens of a query or a key
        self.heads, self.kv_heads = options.heads // mesh.tensor.size, options.kv_heads // mesh.tensor.size
        q_width, kv_width = options.heads * D, options.kv_heads * D
        parts = (q_width, kv_width)
        self.query_key = ColumnLinear(
            make.scope("query_key"), H, parts, init=init.hidden(H, q_width), bias=options.qkv_bias, unit=D
        )
        self.value = ColumnLinear(
            make.scope("value"), H, (kv_width,), init=init.hidden(H, kv_width), bias=options.qkv_bias, unit=D
        )
        width, first = self.kv_heads * D, self.kv_heads * D * mesh.tensor.rank
        self.undelayed = min(max(kv_width // 2 - first, 0), width)  # value channels here of the token itself
        self.depthwise = Convolution(make.scope("depthwise"), parts, D, 1, options.depthwise)
        larger = init.factors.base_head_dim is not None  # heads grow in size
        self.grouped = Convolution(make.scope("grouped"), parts, D, D, options.grouped, larger)
        self.temperature = make.parameter(
            "temperature",
            (options.kv_heads,),
            role=Role.STATE,
            shard=Shard(0),
            keep_fp32=True,
            init=ZEROS if options.temperature == "exponential" else ONES,
        )
        self.output = RowLinear(
            make.scope("output"), q_width, H, init=init.output(q_width, H), bias=options.output_bias, unit=D
        )
        self.rotary = Rotary(options.rotary, D) if options.position == "rotary" else None
        self.pattern = Pattern(D**-0.5, options.window).computed_by(model.fused_attention)
        self.entropy = AttentionEntropy()

    def forward(self, x: Tensor, stream: Stream, state: CCAState | None = None) -> Tensor:
        x_BSH = enter(x, self.mesh)
        projected, value = self.query_key(x_BSH), self.value(x_BSH)
        if self.context.size > 1:
            starts = shared_starts(stream, self.context, state)
            past = self._before(projected, value, starts, state or CCAState())
        else:
            starts, past = piece_starts(stream, state), state or CCAState()
        begin = past.cache.length
        q, k = recomputed(
            self._mixed,
            projected,
            self.depthwise.weight,
            self.depthwise.bias,
            self.grouped.weight,
            self.grouped.bias,
            self.temperature,
            past.query_key,
            starts,
        )
        v = self._delayed(value, past.value, starts).unflatten(-1, (-1, self.D))
        if self.rotary is not None:
            angles = stream_angles(self.rotary, self.D, stream, begin, x_BSH, self.context.size)
            q, k = self.rotary.turn(q, angles), self.rotary.turn(k, angles)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        documents = stream.documents
        if state is not None:
            state.query_key = taps_after(self.context, projected, past.query_key, self.taps, starts)
            state.value = self.context.to_first(value[:, -1:, self.undelayed :])
            if documents is not None:
                if isinstance(state.cache, KeyValueCache) and state.documents is not None:
                    documents = torch.cat([state.documents, documents], 1)
                state.documents = documents if self.context.size == 1 else self.context.to_first(documents[:, -1:])
        elsewhere: Keys | None = past.cache
        if isinstance(elsewhere, KeyValueCache):
            if state is not None:
                k, v = elsewhere.append(k, v)
                stream = replace(stream, documents=documents)
            elsewhere = None
        if self.entropy.active and self.training and state is None:
            self.entropy.see(q, k, self.pattern, stream, self.context)
        y = attend_in(self.context, q, k, v, self.pattern, stream, elsewhere=elsewhere)
        return self.output(y.transpose(1, 2).reshape(*x_BSH.shape[:2], -1))

    def _before(self, projected: Tensor, value: Tensor, starts_BS: Tensor | None, of_piece: CCAState) -> CCAState:
        """State of the rank before, or of the piece before, for this rank's first tokens."""
        past = CCAState(of_piece.cache)
        past.query_key = taps_before(self.context, projected, of_piece.query_key, self.taps, starts_BS)
        past.value = token_before(self.context, value[..., self.undelayed :], of_piece.value)
        if self.value.bias is not None and of_piece.value is None:  # every rank reads it (see `_delayed`)
            first = float(self.context.rank == 0)
            past.value = past.value + self.value.bias[self.undelayed :] * first if past.value is not None else None
        return past

    def _mixed(
        self,
        projected_BSC: Tensor,
        weight_C1T: Tensor,
        bias_C: Tensor,
        grouped_CDT: Tensor,
        grouped_bias_C: Tensor,
        temperature_m: Tensor,
        past_BTC: Tensor | None,
        starts_BS: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Queries [B, S, n, D] and keys [B, S, m, D] of length sqrt(D), the keys times their temperature."""
        first, second, D = self.options.depthwise, self.options.grouped, self.D
        length, heads = projected_BSC.shape[1], self.heads + self.kv_heads
        # The first convolution also runs at the positions before the piece that the second one reads. Before a document
        # all its inputs are zero, so its result there is its bias.
        padded = with_past(projected_BSC, past_BTC, first + second - 1)
        places = torch.arange(length, device=padded.device)
        if starts_BS is not None:
            seen_first = F.pad(places - starts_BS, (second - 1, 0), value=2**31).unsqueeze(-1)
            seen_second = (places - starts_BS).unsqueeze(-1)
        x = bias_C
        for tap in range(first):
            term = padded[:, tap : tap + length + second - 1] * weight_C1T[:, 0, tap]
            x = x + (term if starts_BS is None else term * (seen_first >= first - 1 - tap))
        windows = [x[:, tap : tap + length] for tap in range(second)]
        if starts_BS is not None:
            windows = [torch.where(seen_second >= second - 1 - tap, each, bias_C) for tap, each in enumerate(windows)]
        window = torch.cat([each.unflatten(-1, (heads, D)) for each in windows], -1)  # [B, S, n + m, taps D]
        matrices = grouped_CDT.unflatten(0, (heads, D)).transpose(2, 3).flatten(2, 3)
        mixed = at_least_fp32(torch.einsum("bshi,hoi->bsho", window, matrices))
        mixed = mixed + at_least_fp32(grouped_bias_C).unflatten(0, (heads, D))
        plain = at_least_fp32(projected_BSC).unflatten(-1, (heads, D))
        q, k = plain.split([self.heads, self.kv_heads], 2)
        mean = (q.unflatten(2, (self.kv_heads, -1)) + k.unsqueeze(3)) / 2  # [B, S, m, n / m, D]
        q, k = mixed.split([self.heads, self.kv_heads], 2)
        q, k = _sized(q + mean.flatten(2, 3)), _sized(k + mean.mean(3))
        scale = temperature_m.exp() if self.options.temperature == "exponential" else temperature_m
        return q.to(projected_BSC.dtype), (k * scale.unsqueeze(-1)).to(projected_BSC.dtype)

    def _delayed(self, value_BSd: Tensor, before_B1d: Tensor | None, starts_BS: Tensor | None) -> Tensor:
        """Values whose second half (of all ranks' channels) comes from the token before.

        Before a document that half is the bias, as for a token of zeros. Every rank reads the bias, also where all its
        channels come from the token itself: ZeRO 3 gathers tensors that are read, and all ranks have to gather alike.
        """
        now, later = value_BSd[..., : self.undelayed], value_BSd[..., self.undelayed :]
        bias = self.value.bias
        nothing = later.new_zeros(later.shape[-1]) if bias is None else bias[self.undelayed :]
        if before_B1d is None:
            before_B1d = nothing.expand(later.shape[0], 1, -1)
        delayed = torch.cat([before_B1d, later[:, :-1]], 1)
        if starts_BS is not None:
            places = torch.arange(starts_BS.shape[1], device=starts_BS.device)
            delayed = torch.where((starts_BS == places).unsqueeze(-1), nothing, delayed)
        return torch.cat([now, delayed], -1)

    @staticmethod
    def sends(model: ModelSection, options: CCAOptions, tensor: TensorAxis) -> list[Event]:
        H, D, ranks = model.hidden_size, options.head_dim, tensor.ranks
        q_width, kv_width = options.heads * D // ranks, options.kv_heads * D // ranks
        products = column_events(tensor, q_width + kv_width, kv_width)
        return [Enter(H), *products, *row_events(H, options.output_bias, tensor, options.heads * D)]

    @staticmethod
    def exchanges(model: ModelSection, options: CCAOptions, around: Around) -> list[LayerMessage]:
        ranks, D = around.tensor, options.head_dim
        heads, kv_heads = options.heads // ranks, options.kv_heads // ranks
        width = kv_heads * D
        delayed = width - min(max(options.kv_heads * D // 2 - width * around.mesh.tensor.rank, 0), width)
        taps = options.depthwise + options.grouped - 2
        before = scan_messages(around, taps * (heads + kv_heads) * D, delayed)
        return before + attention_messages(around, heads, kv_heads, D, D, options.window)

    @staticmethod
    def counts(model: ModelSection, options: CCAOptions, sequence_length: int) -> Counts:
        H, D = model.hidden_size, options.head_dim
        q_width, kv_width = options.heads * D, options.kv_heads * D
        mixed = q_width + kv_width
        projections = H * (mixed + kv_width) + q_width * H
        biases = (mixed + kv_width if options.qkv_bias else 0) + (H if options.output_bias else 0)
        convolutions = mixed * (options.depthwise + options.grouped * D + 2)
        seen = min(options.window or sequence_length, sequence_length)
        return Counts(
            parameters=projections + biases + convolutions + options.kv_heads,
            flops=2 * (projections + options.grouped * D * mixed) + 2 * 2 * seen * q_width,
            # queries and keys, projected and mixed, values, attention's output and its log-sum-exp
            activations=2 * mixed + kv_width + q_width + options.heads,
            products=2 * mixed + kv_width + q_width + options.heads + H,
            state=2 * kv_width * seen + (options.depthwise + options.grouped - 2) * mixed + kv_width - kv_width // 2,
        )


def _sized(x_BSnD: Tensor) -> Tensor:
    """Vectors of length sqrt(D)."""
    length = x_BSnD.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).eps)
    return x_BSnD * (math.sqrt(x_BSnD.shape[-1]) / length)
