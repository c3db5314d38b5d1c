"""Facts of Jorge."""

from __future__ import annotations

from megatron.config.optimizer_kind import OptimizerKind, Option

OPTIMIZER = OptimizerKind(
    update="more_optimizers.jorge.update:Jorge",
    state_bytes=lambda config: 8,
    reads=("betas", "epsilon", "momentum"),
    options={
        "frequency": Option(10, 1, 10**9, "steps between two updates of the preconditioners", whole=True),
        "start": Option(1e-6, 1e-30, 1e6, "the factors begin as this times the identity"),
        "lr": Option(None, 0, 1000, "peak rate of the matrices, of SGD's size (default: optimizer.lr)"),
    },
    whole_matrices=True,
)
