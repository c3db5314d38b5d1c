"""Tensors that wait in the host's memory between uses.

On a GPU a stream of their own copies them out and back, the next one while one is used. On a CPU the same calls copy
nothing, since its memory is the host's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake


@lru_cache(maxsize=8)
def _copies(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _aside(tensor: Tensor) -> bool:
    """Whether copies of it go through a stream of their own."""
    return tensor.device.type == "cuda" and not is_fake(tensor)


@dataclass
class _Parked:
    held: Tensor
    device: torch.device
    written: torch.cuda.Event | None = None


class HostMemory:
    """Tensors by number, on the host."""

    def __init__(self) -> None:
        self._parked: dict[int, _Parked] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._parked

    def put(self, number: int, tensor: Tensor) -> None:
        """Keep the tensor in place of an earlier one. Its memory may be used again at once."""
        tensor = tensor.detach()
        if not _aside(tensor):
            self._parked[number] = _Parked(tensor.to("cpu"), tensor.device)
            return
        stream = _copies(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            held.copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)
            self._parked[number] = _Parked(held, tensor.device, stream.record_event())

    def pop(self, number: int) -> Tensor:
        """The tensor on its device, and no longer here."""
        (found,) = (each for _, each in self.each([number]))
        del self._parked[number]
        return found

    def each(self, numbers: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """The tensors of these numbers, on their device. The next one is copied while one is used."""
        coming = self._fetch(numbers[0]) if numbers else None
        for place, number in enumerate(numbers):
            assert coming is not None
            here, ready = coming
            coming = self._fetch(numbers[place + 1]) if place + 1 < len(numbers) else None
            if ready is not None:
                torch.cuda.current_stream(here.device).wait_event(ready)
                here.record_stream(torch.cuda.current_stream(here.device))
            yield number, here

    def _fetch(self, number: int) -> tuple[Tensor, torch.cuda.Event | None]:
        parked = self._parked[number]
        if parked.written is None:
            return parked.held.to(parked.device), None
        stream = _copies(parked.device)
        with torch.cuda.stream(stream):
            stream.wait_event(parked.written)
            here = parked.held.to(parked.device, non_blocking=True)
            return here, stream.record_event()
