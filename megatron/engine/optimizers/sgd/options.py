"""Facts of SGD."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.config.optimizer_kind import OptimizerKind
from megatron.config.problems import Problem

if TYPE_CHECKING:
    from megatron.config.rule_context import RuleContext


def nesterov_has_momentum(context: RuleContext) -> Iterator[Problem]:
    optimizer = context.config.optimizer
    if optimizer.nesterov and optimizer.momentum == 0:
        yield context.problem(
            "optimizer.nesterov",
            "optimizer.momentum",
            rule="Nesterov momentum must go with a momentum above 0",
            fix="use optimizer.momentum=0.9, or nesterov: false",
        )


OPTIMIZER = OptimizerKind(
    update="megatron.engine.optimizers.sgd.update:SGD",
    state_bytes=lambda config: 4 if config.optimizer.momentum else 0,
    reads=("momentum", "nesterov"),
    rates_for=("mup",),
    why_no_rates="its steps depend on the size of gradients",
    rules=(nesterov_has_momentum,),
)
