"""Small all-gathers that are asked for one after the other, and waited for later, as one message.

A message has a cost of its own, whatever its size. ZeRO 3 gathers each norm and bias after the update, and waits when
it has asked for all. Here such a message is kept until somebody waits for it; then all of its kind that are kept go
together. Every rank asks and waits in the same order, so that all join the same. What arrives has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

Gather = Callable[[Tensor, Tensor], Any]


class _Batch:
    """Gathers of one type in one group: (result [n b], block [b]) of each."""

    def __init__(self, gather: Gather, ranks: int) -> None:
        self._gather, self._ranks = gather, ranks
        self.parts: list[tuple[Tensor, Tensor]] = []
        self.sent = False

    def send(self) -> None:
        """Once; complete when it returns."""
        if self.sent:
            return
        self.sent = True
        if len(self.parts) == 1:
            self._gather(*self.parts[0])
            return
        together = torch.cat([block.view(-1) for _, block in self.parts])
        everyone = together.new_empty((self._ranks, together.numel()))
        self._gather(everyone.view(-1), together)
        pieces = everyone.split([block.numel() for _, block in self.parts], 1)
        for (result, _), piece in zip(self.parts, pieces):
            result.view(self._ranks, -1).copy_(piece)


class _Kept(Work):
    """The handle of a gather that is sent when somebody waits."""

    def __init__(self, batch: _Batch) -> None:
        super().__init__()
        self._batch = batch

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._batch.send()
        return True

    def is_completed(self) -> bool:
        return self._batch.sent


class Joiner:
    """Keeps gathers until they are waited for."""

    def __init__(self) -> None:
        self._open: dict[Hashable, _Batch] = {}

    def keep(self, key: Hashable, result: Tensor, block: Tensor, ranks: int, gather: Gather) -> Work:
        """A handle of the gather of `block` [b] into `result` [ranks b].

        Args:
            key: those with one are sent together: their group and type.
            gather: sends one message of this kind, and waits for it.
        """
        batch = self._open.get(key)
        if batch is None or batch.sent:
            batch = self._open[key] = _Batch(gather, ranks)
        batch.parts.append((result, block))
        return _Kept(batch)
