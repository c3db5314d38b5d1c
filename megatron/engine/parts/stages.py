"""Stages of batch size and of sequence length in the engine."""

from collections.abc import Callable

from megatron.config.sequences import Stage, as_stage, stage_at, stages_of
from megatron.config.variants import options_of
from megatron.model.block import Block
from megatron.model.rotary import Rotary

from ..base import BaseEngine
from ..part import EnginePart


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


class SequenceStages(EnginePart):
    """Follows the stages of a run. Layers are built as in the last stage."""

    def attach(self, engine: BaseEngine) -> None:
        self._config, self._module = engine.config, engine.module
        # Only a pipeline engine keeps the shapes of its messages.
        self._changed: Callable[[], None] = getattr(engine.deepspeed, "reset_activation_shape", lambda: None)
        self._now: Stage = stages_of(engine.config)[-1]

    def before_step(self, step: int, micro_batches: int) -> None:
        self.start_at(step)

    def start_at(self, step: int) -> None:
        stage = stage_at(self._config, step)
        if stage == self._now:
            return
        if stage.length != self._now.length:
            self._changed()
        self._now = stage
        model = as_stage(self._config, stage).model
        for block in self._module.modules():
            if isinstance(block, Block):
                for kind, layer in block.turning():
                    for part in layer.modules():
                        if isinstance(rotary := getattr(part, "rotary", None), Rotary):
                            rotary.use(options_of(model, kind).rotary)
