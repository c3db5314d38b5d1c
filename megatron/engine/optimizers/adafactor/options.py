"""Facts of Adafactor."""

from __future__ import annotations

from megatron.config.optimizer_kind import OptimizerKind, Option

OPTIMIZER = OptimizerKind(
    update="megatron.engine.optimizers.adafactor.update:Adafactor",
    state_bytes=lambda config: 8,  # of AdamW's vectors. Matrices need next to nothing
    reads=("betas", "epsilon"),
    options={
        "decay": Option(0.8, 0, 10, "the average of squares at step t has the coefficient 1 - t^-decay"),
        "clip": Option(1.0, 1e-6, 1e6, "largest root mean square of an update"),
    },
    whole_matrices=True,
)
