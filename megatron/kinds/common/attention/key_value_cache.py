"""Decoding state of every kind that attends: keys and values of the tokens that were read."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.parallel.layout.mesh import Axis

from .chunked_keys import ChunkedKeys
from .paged_keys import PagedKeys
from .spread_keys import SpreadKeys


@dataclass
class KeyValueCache:
    """Keys and values of the tokens read so far, [B, m, length, D]. Buffers grow by doubling.

    Where gradients flow through them, each piece makes new tensors."""

    keys: Tensor | None = None
    values: Tensor | None = None
    length: int = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        end = self.length + k.shape[2]
        if k.requires_grad or v.requires_grad:
            if self.keys is not None and self.values is not None:
                k = torch.cat([self.keys[:, :, : self.length], k], 2)
                v = torch.cat([self.values[:, :, : self.length], v], 2)
            self.keys, self.values, self.length = k, v, end
            return k, v
        keys, values = self.keys, self.values
        if keys is None or values is None or end > keys.shape[2]:
            self.keys, self.values = self._grown(keys, k, 2 * end), self._grown(values, v, 2 * end)
            keys, values = self.keys, self.values
        keys[:, :, self.length : end], values[:, :, self.length : end] = k, v
        self.length = end
        return keys[:, :, :end], values[:, :, :end]

    def all(self) -> tuple[Tensor, Tensor]:
        """The keys and values of all tokens so far.

        Raises:
            ValueError: there are none.
        """
        if self.keys is None or self.values is None:
            raise ValueError("keys are read of a layer that has seen no token")
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def in_chunks(self) -> ChunkedKeys:
        """State between the chunks of a sequence."""
        return ChunkedKeys()

    def over(self, axis: Axis) -> SpreadKeys:
        """State where ranks share the tokens of a text."""
        return SpreadKeys(axis)

    def _grown(self, old: Tensor | None, new: Tensor, room: int) -> Tensor:
        buffer = new.new_empty((new.shape[0], new.shape[1], room, new.shape[3]))
        if old is not None:
            buffer[:, :, : self.length] = old[:, :, : self.length]
        return buffer


Keys = KeyValueCache | ChunkedKeys | SpreadKeys | PagedKeys  # states of a layer that attends
