"""Retention (Sun et al. 2023), cut over tensor parallel ranks by heads.

Shapes: B samples, S positions, H hidden, h heads of N channels (H = h N), heads of this rank by default.

    y_t = sum over s <= t of a^(t - s) (q_t . k_s) / sqrt(N) v_s        a one number per head, below 1
    M_t = a M_{t-1} + k_t v_t^T,  y_t = q_t M_t / sqrt(N)               the same, one token after another
    out = output(rmsnorm(y) * silu(gate))
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.recurrence.pieces import piece_starts
from megatron.model.counts import Counts
from megatron.model.initialisation import Initialisation
from megatron.model.stream import Stream
from megatron.parallel.layers.collectives import enter
from megatron.parallel.layers.linear import ColumnLinear, RowLinear
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.initial import ONES
from megatron.parallel.layout.precision import at_least_fp32
from megatron.parallel.layout.shard import Role, Shard

from .options import RetentionOptions


@dataclass
class RetentionState:
    """State of decoding after the tokens that were read.

    Attributes:
        memory: M [B, h, N keys, N values], fp32.
        document: int [B], the document of the last token, where there are documents.
    """

    memory: Tensor | None = None
    document: Tensor | None = None


class Retention(nn.Module):
    """x [B, s, H] to its output [B, s, H]."""

    def __init__(self, make: ParameterFactory, model: ModelSection, options: RetentionOptions, init: Initialisation):
        super().__init__()
        H, N = model.hidden_size, options.head_dim
        self.mesh, self.options, self.heads = make.mesh, options, options.heads // make.mesh.tensor.size
        self.qkvg = ColumnLinear(make.scope("qkvg"), H, (H, H, H, H), unit=N, init=init.hidden(H, H))
        self.norm_weight = make.parameter("norm.weight", (H,), role=Role.NORM, init=ONES, shard=Shard(0, None, N))
        self.output = RowLinear(make.scope("output"), H, H, unit=N, init=init.output(H, H))

    def forward(self, x: Tensor, stream: Stream, state: RetentionState | None = None) -> Tensor:
        x_BSH, starts_BS = enter(x, self.mesh), piece_starts(stream, state)
        q, k, v, gate = self.qkvg(x_BSH).chunk(4, -1)
        q, k, v = (at_least_fp32(each).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (q, k, v))
        log_a_h = self.log_decays(q)
        y_BhSN = retention(q, k, v, log_a_h, starts_BS, None if state is None else state.memory)
        if state is not None:
            state.memory = remembered(k, v, log_a_h, starts_BS, state.memory)
            state.document = None if stream.documents is None else stream.documents[:, -1]
        y = y_BhSN * (y_BhSN.square().mean(-1, keepdim=True) + self.options.norm_epsilon).rsqrt()
        y = y.transpose(1, 2).flatten(2).to(gate.dtype) * self.norm_weight.to(gate.dtype)
        return self.output(y * F.silu(gate))

    def log_decays(self, like: Tensor) -> Tensor:
        """log a of this rank's heads, [h]: heads are numbered over all ranks."""
        first = self.mesh.tensor.rank * self.heads
        number = torch.arange(first, first + self.heads, device=like.device, dtype=like.dtype)
        return torch.log1p(-torch.exp2(-(self.options.slowest + number)))

    def new_state(self) -> RetentionState:
        return RetentionState()

    @staticmethod
    def counts(model: ModelSection, options: RetentionOptions, sequence_length: int) -> Counts:
        H, S = model.hidden_size, sequence_length
        return Counts(
            parameters=5 * H * H + H,
            flops=2 * 5 * H * H + 2 * 2 * S * H,
            activations=4 * H + 2 * H + H + options.heads * S,  # q, k, v, gate, y before and after, gated, weights
            products=4 * H + H,
            state=H * options.head_dim,
            memory=H * options.head_dim,
        )


def retention(
    q: Tensor, k: Tensor, v: Tensor, log_a_h: Tensor, starts_BS: Tensor | None = None, memory: Tensor | None = None
) -> Tensor:
    """The outputs [B, h, S, N]. q, k and v are [B, h, S, N].

    Args:
        starts_BS: index of the first token of each token's document, negative where it lies before this piece.
        memory: M before the first position, 0 if None.
    """
    places = torch.arange(q.shape[2], device=q.device)
    distance = (places.unsqueeze(1) - places).to(q.dtype)
    seen_BSS = (distance >= 0).unsqueeze(0)
    if starts_BS is not None:
        seen_BSS = seen_BSS & (places >= starts_BS.unsqueeze(-1))
    decay_hSS = torch.exp(log_a_h[:, None, None] * distance.clamp(min=0))
    q = q * q.shape[-1] ** -0.5
    y = (q @ k.transpose(-1, -2) * (decay_hSS * seen_BSS.unsqueeze(1))) @ v
    if memory is None:
        return y
    reach = torch.exp(log_a_h[:, None] * (places + 1))
    return y + (q @ memory) * (reach * _goes_on(starts_BS, places).unsqueeze(1))[..., None]


def remembered(
    k: Tensor, v: Tensor, log_a_h: Tensor, starts_BS: Tensor | None = None, memory: Tensor | None = None
) -> Tensor:
    """M after the last position, [B, h, N, N]. It has the arguments of `retention`."""
    places = torch.arange(k.shape[2], device=k.device)
    left = torch.exp(log_a_h[:, None] * (len(places) - 1 - places))
    if starts_BS is not None:
        left = left * (places >= starts_BS[:, -1:]).unsqueeze(1)
    written = (k * left[..., None]).transpose(-1, -2) @ v
    if memory is None:
        return written
    kept = torch.exp(log_a_h * len(places)) * _goes_on(starts_BS, places)[:, -1:]
    return written + memory * kept[..., None, None]


def _goes_on(starts_BS: Tensor | None, places: Tensor) -> Tensor:
    """Which positions belong to a document that began before the piece, [B or 1, S]."""
    return torch.ones_like(places, dtype=torch.bool).unsqueeze(0) if starts_BS is None else starts_BS < 0
