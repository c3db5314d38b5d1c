"""Facts of Adam-mini."""

from __future__ import annotations

from megatron.config.optimizer_kind import OptimizerKind

OPTIMIZER = OptimizerKind(
    update="megatron.engine.optimizers.adam_mini.update:AdamMini",
    state_bytes=lambda config: 4,
    reads=("betas", "epsilon"),
    whole_matrices=True,
)
