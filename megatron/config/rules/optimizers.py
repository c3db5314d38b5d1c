"""What single optimizers need of the rest of a recipe."""

from __future__ import annotations

from collections.abc import Iterator

from ..kernels import installed
from ..optimizer_options import PACKAGES, SCHEDULE_FREE
from ..problems import Problem
from ..registry import INSIDE, SCHEDULE
from ..rule_context import RuleContext


def schedule_free_has_no_schedule(context: RuleContext) -> Iterator[Problem]:
    config = context.config
    kind = config.optimizer.type
    if kind not in SCHEDULE_FREE:
        return
    if config.schedule.type in INSIDE[SCHEDULE] and config.schedule.type != "constant":
        yield context.problem(
            "schedule.type",
            "optimizer.type",
            rule=f"{kind} must have a constant rate after the warmup: its average of the weights takes the place of a "
            "decay",
            fix="use schedule.type=constant, with a warmup",
        )
    if config.training.weight_average is not None:
        yield context.problem(
            "training.weight_average",
            "optimizer.type",
            rule=f"must be null with {kind}, which evaluates and saves an average of the weights already",
            fix="remove it",
        )
    betas = {"optimizer.betas": config.optimizer.betas}
    betas |= {f"optimizer.groups.{role}.betas": group.betas for role, group in config.optimizer.groups.items()
              if group.betas is not None}  # fmt: skip
    for key, (first, _) in betas.items():
        if first == 0:
            yield context.problem(
                key,
                "optimizer.type",
                rule=f"the first must be above 0 with {kind}: gradients would be taken at z alone, which does not tell "
                "the average",
                fix="use [0.9, 0.95]",
            )


def packages_are_here(context: RuleContext) -> Iterator[Problem]:
    package = PACKAGES.get(context.config.optimizer.type)
    if package is not None and context.starts_here and not installed(package):
        yield context.problem(
            "optimizer.type",
            rule=f"must be one whose package is installed: {context.config.optimizer.type} needs {package}",
            fix=f"pip install {package}, or use adamw",
        )


RULES = (schedule_free_has_no_schedule,)
INPUT_RULES = (packages_are_here,)
