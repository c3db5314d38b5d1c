"""Decoding state of every kind that attends: keys and values of the tokens that were read."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from megatron.parallel.layout.mesh import Axis

from .chunked_keys import ChunkedKeys
from .spread_keys import Share, SpreadKeys


@dataclass
class KeyValueCache:
    """Keys and values of the tokens read so far, [B, m, length, D].

    Where gradients flow through them, each piece makes new tensors.
    """

    keys: Share = field(default_factory=Share)
    values: Share = field(default_factory=Share)
    length: int = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.length += k.shape[2]
        grows = not (k.requires_grad or v.requires_grad)
        return self.keys.append(k, grows), self.values.append(v, grows)

    def in_chunks(self) -> ChunkedKeys:
        """State between the chunks of a sequence."""
        return ChunkedKeys()

    def over(self, axis: Axis) -> SpreadKeys:
        """State where ranks share the tokens of a text."""
        return SpreadKeys(axis)


Keys = KeyValueCache | ChunkedKeys | SpreadKeys  # states of a layer that attends
