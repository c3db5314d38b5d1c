"""Numbers on their way from a device to the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake


class Arriving:
    """Values of a tensor, copied to the host in the background. Reading them waits only for this copy.

    Values on a CPU are not copied.

    Args:
        values: may change after the call if they are on a GPU.
    """

    def __init__(self, values: Tensor) -> None:
        self._values, self._event = values, None
        if values.device.type == "cuda" and not is_fake(values):
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._values

    def __float__(self) -> float:
        return float(self.read())


class ArrivingEntry(Mapping[str, Any]):
    """A mapping with one entry, computed from a device's numbers when it is read."""

    def __init__(self, name: str, values: Tensor, compute: Callable[[Tensor], Any]) -> None:
        self.source, self._arriving = values, Arriving(values)
        self._name, self._compute = name, compute

    def __iter__(self) -> Iterator[str]:
        yield self._name

    def __len__(self) -> int:
        return 1

    def __getitem__(self, key: str) -> Any:
        if key != self._name:
            raise KeyError(key)
        return self._compute(self._arriving.read())
