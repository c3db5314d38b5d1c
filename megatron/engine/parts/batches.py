"""Stages of batch size in the engine: DeepSpeed adds up the micro-batches that a step has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..part import EnginePart

if TYPE_CHECKING:
    from ..base import BaseEngine


class BatchStages(EnginePart):
    """Follows the number of micro-batches of each step."""

    def attach(self, engine: BaseEngine) -> None:
        self._deepspeed, self._scattered = engine.deepspeed, engine.scattered

    def before_step(self, step: int, micro_batches: int) -> None:
        engine, now = self._deepspeed, self._deepspeed.gradient_accumulation_steps()
        if micro_batches == now:
            return
        engine.set_train_batch_size(engine.train_batch_size() // now * micro_batches)
        engine.micro_steps = 0  # a step ends where this is a multiple of its micro-batches
        if self._scattered is not None:
            self._scattered.begin(micro_batches)
