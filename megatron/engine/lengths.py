"""Stages of sequence length in the engine: layers turn queries and keys as the stage of an update has it."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from megatron.config import Config
from megatron.config.stages import Stage, as_stage, stage_at, stages_of
from megatron.config.variants import options_of
from megatron.model.block import Block
from megatron.model.rotary import Rotary


class SequenceStages:
    """Follows the stages of a run.

    Args:
        module: this rank's layers, made as the last stage has them.
        changed: is called when samples get another length.
    """

    def __init__(self, config: Config, module: nn.Module, changed: Callable[[], None] = lambda: None):
        self._config, self._module, self._changed = config, module, changed
        self.now: Stage = stages_of(config)[-1]

    def enter(self, step: int) -> None:
        """Go to the stage of update `step`; no work where the run is in it."""
        stage = stage_at(self._config, step)
        if stage == self.now:
            return
        if stage.length != self.now.length:
            self._changed()
        self.now = stage
        model = as_stage(self._config, stage).model
        for block in self._module.modules():
            if isinstance(block, Block):
                for kind, layer in block.turning():
                    for part in layer.modules():
                        if isinstance(rotary := getattr(part, "rotary", None), Rotary):
                            rotary.use(options_of(model, kind).rotary)
