"""What attention keeps of the tokens that were read: decoding state of every kind that attends."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class KeyValueCache:
    """Keys and values of the tokens read so far, [B, m, length, D]; buffers grow by doubling.

    Where gradients flow through them, each piece makes new tensors instead.
    """

    keys: Tensor | None = None
    values: Tensor | None = None
    length: int = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        end = self.length + k.shape[2]
        if k.requires_grad or v.requires_grad:
            if self.keys is not None:
                k, v = (
                    torch.cat([old[:, :, : self.length], new], 2) for old, new in ((self.keys, k), (self.values, v))
                )
            self.keys, self.values, self.length = k, v, end
            return k, v
        if self.keys is None or end > self.keys.shape[2]:
            self.keys, self.values = self._grown(self.keys, k, 2 * end), self._grown(self.values, v, 2 * end)
        self.keys[:, :, self.length : end], self.values[:, :, self.length : end] = k, v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _grown(self, old: Tensor | None, new: Tensor, room: int) -> Tensor:
        buffer = new.new_empty((new.shape[0], new.shape[1], room, new.shape[3]))
        if old is not None:
            buffer[:, :, : self.length] = old[:, :, : self.length]
        return buffer
