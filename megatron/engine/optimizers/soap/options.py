"""Facts of SOAP."""

from __future__ import annotations

from megatron.config.optimizer_kind import OptimizerKind, Option

OPTIMIZER = OptimizerKind(
    update="megatron.engine.optimizers.soap.update:SOAP",
    state_bytes=lambda config: 8,
    reads=("betas", "epsilon"),
    options={
        "frequency": Option(10, 1, 10**9, "steps between two refreshes of the eigenbases", whole=True),
        "largest": Option(10_000, 0, 10**9, "a longer side stays in its own basis", whole=True),
        "beta": Option(None, 0, 1, "average of the factors (default: the second of optimizer.betas)", below=True),
    },
    whole_matrices=True,
)
