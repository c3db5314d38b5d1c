"""Reports the layer that a rank works on, where a layer takes long: in forward and backward passes, and in
recomputation, which belongs to the layer's backward pass.

The forward pass of a block is replaced while this is on, outside of compiled and recomputed code, so no graph is
cut. A backward pass reaches a block when the gradient of its output is known."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron.model.block import Block
from megatron.model.stream import Stream

from ..base import BaseEngine
from ..part import EnginePart

LONG = 0.01  # seconds of a layer, forward and backward. Reporting takes less than a thousandth of them


class LayerProgress(EnginePart):
    """Switched on and off between steps, by the time of the step before."""

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
                block.__dict__["forward"] = self._reporting(block.index, plain, ends=number == last)

    def _reporting(self, index: int, plain: Callable[..., Stream], *, ends: bool) -> Callable[..., Stream]:
        report = self._beacon.in_layer

        def backward(_: Tensor) -> None:
            report(index)

        def forward(*inputs: Any, **options: Any) -> Stream:
            report(index)
            stream = plain(*inputs, **options)
            if stream.hidden.requires_grad:
                stream.hidden.register_hook(backward)
            if ends:  # no layer follows
                report(-1)
            return stream

        return forward
