"""Facts of distillation. `config/rules/teacher.py` has the rules about a teacher."""

from megatron.config.features.objective_kind import ObjectiveKind

OBJECTIVE = ObjectiveKind(
    objective="megatron.objectives.distillation.objective:Distillation",
    reads=("teacher", "alpha", "temperature"),
    teacher=True,
)
