"""What a recurrent core reads in each pass: its state and what the prelude gave (see `recurrent_depth`)."""

from __future__ import annotations

import torch
from torch import nn

from megatron.config.sections.model import ModelSection
from megatron.parallel.layers.collectives import enter
from megatron.parallel.layers.linear import RowLinear
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.shard import Role, Shard

from .counts import Counts
from .initialisation import Initialisation
from .stream import INJECTED, Stream


class Injection(nn.Module):
    """W [s; e]: the state and what the prelude gave, [B, s, H] each, to what the core reads. W is cut by columns."""

    def __init__(self, make: ParameterFactory, model: ModelSection, init: Initialisation):
        super().__init__()
        H = model.hidden_size
        self.mesh, self.dtype = make.mesh, make.dtype
        (self.span,) = Shard(1).spans(2 * H, make.mesh.tensor.rank, make.mesh.tensor.size)
        self.mix = RowLinear(make, 2 * H, H, init=init.hidden(2 * H, H), role=Role.HIDDEN)

    def forward(self, stream: Stream) -> Stream:
        both = torch.cat([stream.hidden, stream.channels[INJECTED]], -1).to(self.dtype)
        mine = enter(both, self.mesh)[..., self.span.start : self.span.stop]
        return stream.with_hidden(self.mix(mine).to(stream.hidden.dtype))


def injection_counts(model: ModelSection) -> Counts:
    """Of one pass; what is read is kept together."""
    H = model.hidden_size
    return Counts(parameters=2 * H * H, flops=4 * H * H, activations=2 * H, products=H)
