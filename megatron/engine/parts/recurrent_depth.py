"""Number of passes through the core of a model with recurrent depth."""

from collections.abc import Mapping
from typing import Any

from megatron.model.recurrent_depth import Depth

from ..base import BaseEngine
from ..part import EnginePart, Update

PASSES, PASSES_BACKWARD = "core_passes", "core_passes_backward"


class RecurrentDepth(EnginePart):
    """Passes the step to the model, which keys its draws by it."""

    def __init__(self) -> None:
        self._depth: Depth

    def attach(self, engine: BaseEngine) -> None:
        assert engine.plan.depth is not None
        self._depth = engine.plan.depth

    def before_step(self, step: int, micro_batches: int) -> None:
        self._depth.step = step

    def after_update(self, update: Update) -> Mapping[str, Any]:
        passes = self._depth.passes(training=True)
        return {PASSES: passes.total, PASSES_BACKWARD: passes.backward}
