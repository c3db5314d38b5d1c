"""Facts of schedule-free AdamW."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.config.optimizer_kind import OptimizerKind, Option
from megatron.config.problems import Problem
from megatron.config.registry import INSIDE, SCHEDULE

if TYPE_CHECKING:
    from megatron.config.rule_context import RuleContext


def schedule_free_has_no_schedule(context: RuleContext) -> Iterator[Problem]:
    config = context.config
    kind = config.optimizer.type
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
                rule=f"the first must be above 0 with {kind}: its average does not follow from the weights otherwise",
                fix="use [0.9, 0.95]",
            )


OPTIMIZER = OptimizerKind(
    update="megatron.engine.optimizers.schedule_free_adamw.update:ScheduleFreeAdamW",
    state_bytes=lambda config: 8,
    reads=("betas", "epsilon"),
    options={
        "power": Option(0.0, 0, 100, "step t has a weight of t^power in the average"),
        "rate_power": Option(2.0, 0, 100, "times the largest scheduled rate so far to this power"),
    },
    # An element's step follows from the history of its own gradient and does not depend on its size: Adam's exponents
    # hold (Yang & Littwin 2023, arXiv 2308.01814).
    rates_for=("mup", "completep"),
    averages=True,
    rules=(schedule_free_has_no_schedule,),
)
