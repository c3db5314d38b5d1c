"""Numbers of a device on their way to the host."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake


class Arriving:
    """Values of a tensor, which the host reads later. To read them is to wait for this copy, and for no later work.

    A CPU's are read where they are.

    Args:
        values: may change after the call where they are on a GPU.
    """

    def __init__(self, values: Tensor) -> None:
        self._values, self._event = values, None
        if values.device.type == "cuda" and not is_fake(values):
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> Tensor:
        """The values, on the host."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._values

    def __float__(self) -> float:
        return float(self.read())
