"""Lightning attention (Qin et al. 2024) as in MiniMax-01 (MiniMax 2025), cut over tensor parallel ranks by heads.

Shapes: B samples, S positions, H hidden, h heads of this rank with D channels.

    S_t = exp(-a) S_{t-1} + v_t k_t^T      S [D, D] per head      y_t = S_t q_t

The rate a = 2^(-8 i / n) (1 - l / (L - 1)) of head i of n in layer l of L has no parameter: ALiBi's slope, smaller in
later layers. It is the recurrence of Mamba-2 with time steps of 1."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.attention.context_messages import scan_messages
from megatron.kinds.common.recurrence.recomputed import recomputed
from megatron.kinds.common.recurrence.sequence_scan import carried_by_decay, document_begins, last_document
from megatron.kinds.lightning.options import LightningOptions
from megatron.kinds.mamba.ssd import ends, ssd
from megatron.model.costs.exchanges import Around, LayerMessage
from megatron.model.costs.traffic import Enter, Event, Summed, TensorAxis, column_events, row_events
from megatron.model.counts import Counts
from megatron.model.initialisation import Initialisation
from megatron.model.stream import Stream
from megatron.parallel.layers.collectives import sum_over
from megatron.parallel.layers.linear import ColumnLinear, RowLinear, entered
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.initial import ONES
from megatron.parallel.layout.precision import at_least_fp32, wide_type
from megatron.parallel.layout.shard import Role, Shard

LEAST = 1e-5  # of the layers' factors, which would be 0 in the last one


@dataclass
class LightningState:
    """State between pieces of a sequence. Gradients may flow through it."""

    memory: Tensor | None = None  # [B, h, D, D], fp32
    document: Tensor | None = None  # int [B], document of the last token, where there are documents


class Lightning(nn.Module):
    """x [B, s, H] to its output [B, s, H]: output(norm(y) sigmoid(gate x)), with q, k and v after SiLU."""

    new_state = LightningState

    def __init__(self, make: ParameterFactory, model: ModelSection, options: LightningOptions, init: Initialisation):
        super().__init__()
        self.mesh, self.context, self.options = make.mesh, make.context, options
        H, D, width = model.hidden_size, options.head_dim, options.heads * options.head_dim
        self.heads, self.width = options.heads // make.mesh.tensor.size, width
        last = len(model.blocks) - 1
        self.factor = 1.0 - min(init.index, last) / (last + LEAST) + LEAST
        self.query_key_value = ColumnLinear(
            make.scope("query_key_value"), H, (width, width, width), init=init.hidden(H, width), unit=D
        )
        self.gate = ColumnLinear(make.scope("gate"), H, (width,), init=init.hidden(H, width), unit=D)
        self.norm = make.parameter("norm.weight", (width,), role=Role.NORM, init=ONES, shard=Shard(0, None, D))
        self.output = RowLinear(make.scope("output"), width, H, init=init.output(width, H), unit=D)

    def forward(self, x: Tensor, stream: Stream, state: LightningState | None = None) -> Tensor:
        _, (made, gate) = entered(x, (self.query_key_value, self.gate), self.mesh)
        q, k, v = (each.unflatten(-1, (self.heads, -1)) for each in F.silu(made).chunk(3, dim=-1))
        starts, past = document_begins(stream, state, self.context), state or LightningState()
        # no time steps, and no skip: numbers without memory
        nothing = q.new_zeros((), dtype=wide_type(q.dtype))
        heads = torch.arange(1, self.heads + 1, device=q.device, dtype=nothing.dtype)
        heads = heads + self.heads * self.mesh.tensor.rank
        rates = heads * (-8.0 * math.log(2.0) / self.options.heads) + math.log(self.factor)  # logarithms
        dt, zeros = nothing.expand(*q.shape[:3]), nothing.expand(self.heads)
        sizes: dict[str, Any] = {"chunk": self.options.chunk, "limits": (1.0, 1.0)}
        before = past.memory
        if self.context.size > 1:
            of = functools.partial(ends, **sizes)
            before = carried_by_decay(self.context, *recomputed(of, v, dt, zeros, rates, k, starts), before)
        y, memory = ssd(v, dt, zeros, rates, zeros, k, q, **sizes, initial_BhPN=before, starts_BS=starts)
        if state is not None:
            state.memory, state.document = self.context.to_first(memory), last_document(self.context, stream)
        return self.output(recomputed(self._gated_norm, y.flatten(2, 3), gate, self.norm))

    def _gated_norm(self, y_BSd: Tensor, gate_BSd: Tensor, weight_d: Tensor) -> Tensor:
        """RMSNorm over the channels of all heads, which may lie on several ranks, times the gate."""
        y = at_least_fp32(y_BSd)
        squares = sum_over(y.square().sum(-1, keepdim=True), self.mesh.tensor)
        y = y * torch.rsqrt(squares / self.width + self.options.norm_epsilon)
        return gate_BSd.sigmoid() * (y.to(y_BSd.dtype) * weight_d)

    @staticmethod
    def sends(model: ModelSection, options: LightningOptions, tensor: TensorAxis) -> list[Event]:
        H, width = model.hidden_size, options.heads * options.head_dim
        products = column_events(tensor, 3 * width // tensor.ranks, width // tensor.ranks)
        # the norm keeps only its inputs
        return [Enter(H), *products, Summed(1, wide=True, again=True), *row_events(H, False, tensor, width)]

    @staticmethod
    def exchanges(model: ModelSection, options: LightningOptions, around: Around) -> list[LayerMessage]:
        heads = options.heads // around.tensor
        return scan_messages(around, made=heads * options.head_dim**2, left=heads)

    @staticmethod
    def counts(model: ModelSection, options: LightningOptions, sequence_length: int) -> Counts:
        H, width, chunk = model.hidden_size, options.heads * options.head_dim, min(options.chunk, sequence_length)
        matrices, state = 5 * H * width, width * options.head_dim
        return Counts(
            parameters=matrices + width,
            flops=2 * (matrices + 2 * chunk * width + 2 * state),
            activations=9 * width,  # three before and after SiLU, the gate, what is read, and its norm
            products=4 * width + H + chunk * options.heads + 2 * width + state // chunk,
            state=state,
            memory=state,
        )
