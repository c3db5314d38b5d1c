"""Facts of Muon."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.config.optimizer_kind import CAUTIOUS, OptimizerKind, Option
from megatron.config.problems import Problem

if TYPE_CHECKING:
    from megatron.config.rule_context import RuleContext


def muon_has_a_rate(context: RuleContext) -> Iterator[Problem]:
    optimizer = context.config.optimizer
    if optimizer.lr == 0:
        yield context.problem(
            "optimizer.lr",
            "optimizer.type",
            rule="Muon's matrices follow the schedule of optimizer.lr, which must be above 0",
            fix="give the rate of the AdamW part, such as 3e-4",
        )


def per_head_has_standard_rates(context: RuleContext) -> Iterator[Problem]:
    """The norm of a stack of orthogonal heads grows with their number."""
    own, optimizer = context.config.model.parametrization, context.config.optimizer
    if own.type != "standard" and optimizer.options.get("per_head") is True:
        yield context.problem(
            "optimizer.options",
            "model.parametrization.type",
            rule=f"the rates of {own.type} must be derived for the optimizer, and are so for muon without per_head",
            fix="remove per_head, or use type: standard",
        )


_about = "the polynomials of the iteration, by Jordan et al. 2024 or Amsel et al. 2025"
OPTIMIZER = OptimizerKind(
    update="megatron.engine.optimizers.muon.update:Muon",
    state_bytes=lambda config: 4,
    reads=("betas", "epsilon", "muon_lr", "muon_momentum", "muon_scale"),
    options={
        "per_head": Option(False, 0, 1, "queries, keys and values are orthogonalised by heads", switch=True),
        "polynomials": Option("jordan", 0, 0, _about, choices=("jordan", "polar_express")),
        "cautious": CAUTIOUS,
    },
    rates_for=("mup", "completep"),  # its updates have a size of their own
    whole_matrices=True,
    rules=(muon_has_a_rate, per_head_has_standard_rates),
)
