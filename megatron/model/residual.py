"""Trained scales and shifts per channel where branches join the residual stream, as in ZAYA1 (Anthony et al. 2025).

Shapes: B samples, s positions of this rank, H hidden."""

import torch
from torch import Tensor, nn

from megatron.config.sections.model import ModelSection
from megatron.parallel.layers.collectives import sum_gradient
from megatron.parallel.layers.linear import sequence_slice
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.initial import ONES, ZEROS
from megatron.parallel.layout.random import dropout, sequence_counters, site_key
from megatron.parallel.layout.shard import Role

from .stream import Stream


class ChannelScale(nn.Module):
    """Vectors `scale` and `shift` for each of `names`: (x + shift) * scale, which starts as the identity.

    Args:
        names: of the parts, in the order of the arguments of `forward`. "" gives the vectors no prefix.
    """

    def __init__(self, make: ParameterFactory, size: int, names: tuple[str, ...] = ("",)):
        super().__init__()
        # With sequence parallelism each rank sees some of the positions, and the vectors' gradients are summed.
        self.axis = make.mesh.tensor if make.mesh.layout.sequence else None
        for name in names:
            for part, init in (("scale", ONES), ("shift", ZEROS)):
                key = f"{name}_{part}".lstrip("_")
                self.register_parameter(key, make.parameter(key, (size,), role=Role.NORM, init=init, stream=0))

    def forward(self, *parts: Tensor) -> Tensor:
        """The sum of the scaled and shifted [B, s, H], with one product per part."""
        vectors: tuple[Tensor, ...] = tuple(self.parameters())
        if self.axis is not None:
            vectors = sum_gradient(torch.stack(vectors), self.axis).unbind()
        scales, shifts = vectors[::2], vectors[1::2]
        total = scales[0] * shifts[0]
        for scale, shift in zip(scales[1:], shifts[1:]):
            total = total + scale * shift
        for part, scale in zip(parts, scales):
            total = torch.addcmul(total, part, scale)
        return total


def residual_merge(make: ParameterFactory, size: int) -> ChannelScale:
    """Adds a branch's output to the stream, in this order of arguments."""
    return ChannelScale(make, size, ("branch", "stream"))


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
