"""Facts of AdamW with 8-bit moments."""

from __future__ import annotations

from megatron.config.optimizer_kind import OptimizerKind, Option, Package

OPTIMIZER = OptimizerKind(
    update="megatron.engine.optimizers.adamw_8bit.update:AdamW8bit",
    state_bytes=lambda config: 2,
    reads=("betas", "epsilon"),
    options={"smallest": Option(4096, 1, 10**12, "matrices of fewer elements keep fp32 moments", whole=True)},
    # An element's step follows from the history of its own gradient and does not depend on its size: Adam's exponents
    # hold (Yang & Littwin 2023, arXiv 2308.01814).
    rates_for=("mup", "completep"),
    whole_matrices=True,
    package=Package("torchao", "optim/subclass_8bit.py", "pip install torchao"),
)
