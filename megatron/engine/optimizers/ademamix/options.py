"""Facts of AdEMAMix."""

from __future__ import annotations

from megatron.config.optimizer_kind import OptimizerKind, Option

OPTIMIZER = OptimizerKind(
    update="megatron.engine.optimizers.ademamix.update:AdEMAMix",
    state_bytes=lambda config: 12,
    reads=("betas", "epsilon"),
    options={
        "slow": Option(0.9999, 0, 1, "coefficient of the slow average", below=True),
        "alpha": Option(5.0, 0, 1000, "weight of the slow average"),
        "warmup": Option(None, 0, 10**12, "steps until both are reached (default: training.steps)", whole=True),
    },
    # An element's step follows from the history of its own gradient and does not depend on its size: Adam's exponents
    # hold (Yang & Littwin 2023, arXiv 2308.01814).
    rates_for=("mup", "completep"),
)
