"""Has a rank tell in which layer it is, where a layer takes long: in forward and backward passes, and in the repetition
of a forward pass, which is part of the layer's backward pass.

The forward pass of a block is replaced while this is on: outside of what is compiled and of what is computed again, so
no graph is cut. That a backward pass has come to a block is heard where the gradient of the block's output is known.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron.model.block import Block
from megatron.model.stream import Stream

from ..part import EnginePart

if TYPE_CHECKING:
    from ..base import BaseEngine

LONG = 0.01  # seconds of a layer, forward and backward, of which telling takes less than a thousandth


class ToldLayers(EnginePart):
    """Switched on and off between steps, by how long the step before took."""

    def attach(self, engine: BaseEngine) -> None:
        self._blocks = [each for each in engine.module.modules() if isinstance(each, Block)]
        self._beacon, self._plain = engine.beacon, list[Callable[..., Stream]]()

    def before_step(self, step: int, micro_batches: int) -> None:
        if (self._beacon.pace >= LONG * micro_batches * len(self._blocks)) == bool(self._plain):
            return
        if self._plain:
            for block, plain in zip(self._blocks, self._plain):
                block.__dict__["forward"] = plain
            self._plain = []
        else:
            self._plain = [block.forward for block in self._blocks]
            last = len(self._blocks) - 1
            for number, (block, plain) in enumerate(zip(self._blocks, self._plain)):
                block.__dict__["forward"] = self._told(block.index, plain, ends=number == last)

    def _told(self, index: int, plain: Callable[..., Stream], *, ends: bool) -> Callable[..., Stream]:
        tell = self._beacon.in_layer
        back = partial(_backward, tell, index)

        def forward(*inputs: Any, **options: Any) -> Stream:
            tell(index)
            stream = plain(*inputs, **options)
            if stream.hidden.requires_grad:
                stream.hidden.register_hook(back)
            if ends:  # what follows is no layer
                tell(-1)
            return stream

        return forward


def _backward(tell: Callable[[int], None], index: int, _: Tensor) -> None:
    tell(index)
