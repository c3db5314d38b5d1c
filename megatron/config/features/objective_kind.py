"""The facts of an objective that are needed before its class is imported. No torch here.

An objective declares them in one `ObjectiveKind`, in a module that needs no torch. Its name in the registry stands for
that object, whose name is in capitals (`my_lab.smoothing.options:OBJECTIVE`). A name may also stand for the
class itself (`my_lab.focal:Focal`). Nothing is then known of the objective before the ranks import it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..optimizer_kind import Option
from ..problems import Problem
from ..registry import OBJECTIVE, description_of, descriptions_inside

if TYPE_CHECKING:
    from ..rule_context import RuleContext
    from ..schema import Config

Rule = Callable[["RuleContext"], Iterator[Problem]]


@dataclass(frozen=True)
class ObjectiveKind:
    """One objective.

    Attributes:
        objective: import path of its class (`objectives.contract.Objective`).
        reads: keys of the section `objective` that it reads, besides `type` and `options`.
        options: keys of `objective.options` that it reads. Others are refused.
        teacher: it learns from the model that `objective.teacher` names.
        logits: it has a `cost_of_logits`.
        labels: it has a `cost_of_labels`.
        rules: on its use in a configuration.
    """

    objective: str
    reads: tuple[str, ...] = ()
    options: Mapping[str, Option] = field(default_factory=dict)
    teacher: bool = False
    logits: bool = False
    labels: bool = False
    rules: tuple[Rule, ...] = ()

    def options_of(self, config: Config) -> dict[str, Any]:
        """All options: those given in the configuration, and defaults."""
        given = config.objective.options
        return {key: given.get(key, option.default) for key, option in self.options.items()}


def objective_kind(config: Config) -> ObjectiveKind | None:
    """The kind of the run's objective. None: its name stands for a class, or for nothing that can be imported."""
    return description_of(OBJECTIVE, config.objective.type, tuple(config.model.extensions), ObjectiveKind)


def objectives_inside() -> dict[str, ObjectiveKind]:
    """The kinds of all objectives of this package, by name."""
    return descriptions_inside(OBJECTIVE, ObjectiveKind)


def validation_is_given(context: RuleContext, read: str, form: str) -> Iterator[Problem]:
    """The rule that a run which evaluates has data for it in `data.options`. `form` is an example of them."""
    evaluation = context.config.evaluation
    evaluates = evaluation.every is not None or evaluation.at_start or evaluation.at_end
    if evaluates and "validation" not in context.config.data.options:
        yield context.problem(
            "data.options evaluation.every",
            rule=f"must have the key validation, with the {read} that are evaluated",
            fix=f"give validation: {form}, or evaluation.every=null and evaluation.at_end=false",
        )
