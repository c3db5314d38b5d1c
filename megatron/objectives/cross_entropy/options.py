"""Facts of next-token prediction."""

from __future__ import annotations

from megatron.config.features.objective_kind import ObjectiveKind

OBJECTIVE = ObjectiveKind(objective="megatron.objectives.cross_entropy.objective:CrossEntropy")
