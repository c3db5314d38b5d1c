"""Facts of the objective, without torch."""

from __future__ import annotations

from megatron.config.features.objective_kind import ObjectiveKind
from megatron.config.optimizer_kind import Option

OBJECTIVE = ObjectiveKind(
    objective="my_lab.smoothing.objective:Smoothing",
    options={
        "share": Option(0.1, 0, 1, "of the uniform distribution in what a label says", below=True),
        "entropy": Option(0.0, 0, 10, "coefficient of the entropy, which is rewarded"),
    },
    logits=True,
)
