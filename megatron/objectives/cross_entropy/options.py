"""Facts of next-token prediction, with the defaults of `Objective`: all labels count alike."""

from megatron.config.features.objective_kind import ObjectiveKind

OBJECTIVE = ObjectiveKind(objective="megatron.objectives.contract:Objective")
