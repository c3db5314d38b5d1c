"""Decoding a long text on several ranks: each keeps the keys of some of its tokens (Tree attention, Shyam et al. 2024).

All ranks compute the same queries. Each one attends to its own keys, and the results are combined by the log-sum-exp of
their logits: its maximum over the ranks, then one sum. The bytes that a step sends do not grow with the text.

Shapes: as in `blocks`."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.layers.collectives import all_reduce
from megatron.parallel.layout.mesh import ALONE, Axis
from megatron.parallel.layout.precision import at_least_fp32

from . import blocks
from .blocks import AttentionTile, finite, nothing_seen, tile_with_logits
from .pattern import Pattern


@dataclass(frozen=True)
class Scattered(AttentionTile):
    """A rectangle with keys at any places of the sequence."""

    key_places: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def places(self, queries: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
        return super().places(queries, keys, device)[0], self.key_places


@dataclass
class Share:
    """Numbers of the tokens read so far, [..., length, D], in a buffer that grows by doubling."""

    held: Tensor | None = None
    length: int = 0

    def append(self, new: Tensor) -> Tensor:
        end, held = self.length + new.shape[-2], self.held
        if held is None or end > held.shape[-2]:
            self.held = new.new_empty((*new.shape[:-2], 2 * end, new.shape[-1]))
            if held is not None:
                self.held[..., : self.length, :] = held[..., : self.length, :]
            held = self.held
        held[..., self.length : end, :] = new
        self.length = end
        return held[..., :end, :]


@dataclass
class SpreadKeys:
    """State of a layer that attends, where ranks share the tokens that have been read.

    Every rank keeps an equal part of each piece of a text. Single tokens go to the ranks in turn."""

    axis: Axis = ALONE  # the ranks
    length: int = 0  # tokens read so far, on all ranks
    keys: Share = field(default_factory=Share)
    values: Share = field(default_factory=Share)
    places: Share = field(default_factory=Share)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, sinks_n: Tensor | None = None) -> Tensor:
        """Attention of new tokens to all that were read and to themselves. Arguments and result are equal on all ranks.

        Args:
            q: [B, n, Q, D], k: [B, m, Q, D], v: [B, m, Q, E].
            sinks_n: see `attend`.

        Returns:
            [B, n, Q, E].
        """
        new = q.shape[2]
        number = torch.arange(self.length, self.length + new, device=q.device)
        parts = torch.arange(new, device=q.device).tensor_split(self.axis.size)
        mine = parts[(self.axis.rank - self.length) % self.axis.size]
        keys, values = self.keys.append(k[:, :, mine]), self.values.append(v[:, :, mine])
        places = self.places.append(number[mine].unsqueeze(-1)).squeeze(-1)
        y, normalizer = _part(q, keys, values, places, pattern, self.length)
        self.length += new
        return self._together(y, normalizer, sinks_n).to(q.dtype)

    def _together(self, y: Tensor, normalizer: Tensor, sinks_n: Tensor | None) -> Tensor:
        """The output over the keys of all ranks, from the output over each rank's keys."""
        largest = normalizer.clone()
        if sinks_n is not None:
            largest = torch.maximum(largest, at_least_fp32(sinks_n).view(1, -1, 1))
        largest = finite(all_reduce(largest, self.axis, dist.ReduceOp.MAX))
        weight = (normalizer - largest).exp().unsqueeze(-1)
        total = all_reduce(torch.cat([y * weight, weight], -1), self.axis)
        y, weight = total[..., :-1], total[..., -1:]
        if sinks_n is not None:
            weight = weight + (at_least_fp32(sinks_n).view(1, -1, 1) - largest).exp().unsqueeze(-1)
        return y / weight


def _part(q: Tensor, k: Tensor, v: Tensor, places: Tensor, pattern: Pattern, first: int) -> tuple[Tensor, Tensor]:
    """The output over these keys, and the log-sum-exp of their logits, at least fp32, some rows at a time."""
    y, normalizer = nothing_seen(q, v)
    if not k.shape[2]:
        return y, normalizer
    rows = max(1, blocks.CHUNK // (q.shape[0] * q.shape[1] * k.shape[2]))
    for begin in range(0, q.shape[2], rows):
        some = slice(begin, begin + rows)
        at = Scattered(pattern, first + begin, 0, "some", key_places=places)
        y[:, :, some], normalizer[:, :, some] = tile_with_logits(q[:, :, some], k, v, at)
    return y, normalizer
