"""Objectives by name."""

from megatron.config import Config
from megatron.config.features.objective_kind import ObjectiveKind
from megatron.config.parts import resolve_import
from megatron.config.problems import UserError
from megatron.config.registry import OBJECTIVE, load

from .contract import Objective


def objective_of(config: Config) -> Objective:
    """The objective that `objective.type` names.

    Raises:
        UserError: it cannot be imported, is no objective, or refuses its options.
    """
    name = config.objective.type
    found = resolve_import(config, "objective.type", OBJECTIVE, name)
    kind = found if isinstance(found, ObjectiveKind) else None
    if kind is not None:
        found = load(kind.objective)
    if not (isinstance(found, type) and issubclass(found, Objective)):
        raise UserError(f"objective.type = {name!r} must be a subclass of {Objective.__module__}.Objective")
    objective = found.build(config)
    ways = (objective.costs or objective.teacher is not None, objective.reads_logits, objective.reads_labels)
    if sum(ways) > 1:
        raise UserError(
            f"objective.type = {name!r} must compute its costs in one way: by cost (also with a teacher), "
            "cost_of_logits or cost_of_labels"
        )
    facts = {"teacher": objective.teacher is not None, "logits": objective.reads_logits}
    facts["labels"] = objective.reads_labels
    for fact, holds in facts.items():
        if kind is not None and getattr(kind, fact) != holds:
            raise UserError(f"objective.type = {name!r}: its ObjectiveKind must have {fact}={holds}, as its class does")
    return objective
