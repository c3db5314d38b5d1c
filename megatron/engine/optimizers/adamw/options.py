"""Facts of AdamW."""

from __future__ import annotations

from megatron.config.optimizer_kind import CAUTIOUS, OptimizerKind

OPTIMIZER = OptimizerKind(
    update="megatron.engine.optimizers.adamw.update:AdamW",
    state_bytes=lambda config: 8,
    reads=("betas", "epsilon"),
    options={"cautious": CAUTIOUS},
    # An element's step follows from the history of its own gradient and does not depend on its size: Adam's exponents
    # hold (Yang & Littwin 2023, arXiv 2308.01814).
    rates_for=("mup", "completep"),
    offloads=True,
)
