"""Dropout of the residual stream's branches, drawn by key (see `megatron.parallel.layout.random`)."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.config.sections.model import ModelSection
from megatron.parallel.layers.linear import sequence_slice
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.random import dropout, sequence_counters, site_key

from .stream import Stream


class Dropout(nn.Module):
    """[B, s, H] to the same. Each draw is a function of (seed, site, sample, position, channel)."""

    def __init__(self, make: ParameterFactory, model: ModelSection, site: str):
        super().__init__()
        self.rate, self.mesh, self.context = model.dropout, make.mesh, make.context
        self.key = site_key(make.seed, make.prefix, site)

    def forward(self, x: Tensor, stream: Stream) -> Tensor:
        if self.rate == 0.0 or not self.training:
            return x
        cut = self.mesh.tensor.size if self.mesh.layout.sequence else 1
        places = self.context.places(x.shape[1] * cut, x.device) + stream.first
        places = sequence_slice(places, self.mesh, 0)
        return dropout(x, self.rate, self.key, stream.sample_numbers, sequence_counters(places, x.shape[2]))
