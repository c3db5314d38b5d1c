"""Compressed entries: weighted sums of the projections of a few tokens (DeepSeek-V4, equations 9 to 12 and 20 to 23).

    entry = norm(sum over its tokens j of softmax(gate_j + bias_j) value_j)         for each channel

With overlap a token has two values and two gates: one for its own entry, and one for the next. An entry's position is
that of its own first token. Each document begins with a new entry.

Shapes: B samples, S positions, T positions with some before them, E entries, r rate, w tokens of an entry. It has D
channels, and C are the values and gates of a token."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.config.sections.model import NormOptions
from megatron.kinds.csa.options import CSAOptions
from megatron.model.initialisation import Initialisation
from megatron.model.norm import Norm
from megatron.parallel.layers.collectives import sum_gradient
from megatron.parallel.layers.linear import ColumnLinear
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.initial import ZEROS
from megatron.parallel.layout.precision import at_least_fp32
from megatron.parallel.layout.shard import Role


@dataclass(frozen=True)
class Ends:
    """The last token of each entry."""

    places: Tensor  # int64 [1 or B, E], in the sequence
    positions: Tensor  # int64 [1 or B, E], in its document
    most: int  # a number above all positions
    real: Tensor | None = None  # bool [1 or B, E]. Samples may have fewer entries than others. None: all.

    @staticmethod
    def of(rate: int, begin: int, length: int, positions_BS: Tensor | None, device: torch.device) -> "Ends":
        """Of `length` tokens after `begin` others.

        Args:
            positions_BS: in the documents, where these are apart.
        """
        if positions_BS is None:
            first = min((-begin - 1) % rate, length)
            places = torch.arange(first, length, rate, device=device).unsqueeze(0)
            return Ends(places, places + begin, begin + length)
        places = torch.arange(length, device=device)
        last = torch.where((positions_BS + 1) % rate == 0, places, length).sort(-1).values[:, : length // rate]
        real = last < length
        last = last.clamp(max=length - 1)
        return Ends(last, positions_BS.long().gather(1, last), length, real)


class Compressor(nn.Module):
    """Projections of tokens, and entries [B, E, D] of them. Every tensor parallel rank computes all of it.

    Args:
        channels: of an entry.
        role: of its matrices.
    """

    def __init__(
        self,
        make: ParameterFactory,
        hidden_size: int,
        channels: int,
        options: CSAOptions,
        init: Initialisation,
        norm: NormOptions,
        role: Role = Role.HIDDEN,
    ):
        super().__init__()
        assert options.rate is not None
        self.axis, self.rate, self.span, self.channels = make.mesh.tensor, options.rate, options.span, channels
        self.width = options.series * channels  # of all values of a token
        start = init.hidden if role == Role.HIDDEN else init.reads
        self.project = ColumnLinear(
            make.scope("project"),
            hidden_size,
            (self.width, self.width),
            init=start(hidden_size, self.width),
            role=role,
            shard=False,
        )
        self.bias = make.parameter("bias", (self.rate, self.width), role=Role.BIAS, init=ZEROS, keep_fp32=True)
        self.norm = Norm(make.scope("norm"), channels, norm, partial=True)

    def forward(self, padded_BTC: Tensor, ends: Ends, before: int) -> Tensor:
        """Entries before they are turned.

        Args:
            padded_BTC: projections of `before` tokens and of the tokens in which `ends` counts.
        """
        samples, D, span = padded_BTC.shape[0], self.channels, self.span
        where = ends.places.unsqueeze(-1) + before + 1 + torch.arange(-span, 0, device=padded_BTC.device)
        rows = torch.arange(samples, device=padded_BTC.device).view(-1, 1, 1)
        values, gates = padded_BTC[rows, where.clamp(min=0)].chunk(2, -1)  # [B, E, w, D or 2 D]
        bias = sum_gradient(self.bias, self.axis)
        if span > self.rate:  # the older tokens by their values for the next entry, which come first
            values, gates = (
                torch.cat([x[:, :, : self.rate, :D], x[:, :, self.rate :, D:]], 2) for x in (values, gates)
            )
            bias = torch.cat([bias[:, :D], bias[:, D:]])
        gates = at_least_fp32(gates) + bias
        if span > self.rate:
            first = (ends.positions + 1 < span).unsqueeze(-1) & (torch.arange(span, device=bias.device) < self.rate)
            gates = gates.masked_fill(first.unsqueeze(-1), float("-inf"))
        return self.norm((values * gates.softmax(2).to(values.dtype)).sum(2))
