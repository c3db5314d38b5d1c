"""Facts of the optimizers in this folder, without torch: options, state, rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron.config.optimizer_kind import CAUTIOUS, OptimizerKind, Option, Package
from megatron.config.problems import Problem
from megatron.config.registry import INSIDE, SCHEDULE

if TYPE_CHECKING:
    from megatron.config.rule_context import RuleContext

HERE = "megatron.engine.optimizers"
# Of optimizers in which an element's step follows from the history of its own gradient and does not depend on its size:
# Adam's exponents hold (Yang & Littwin 2023, arXiv 2308.01814). Muon's updates have a size of their own.
RATES_FOR = ("mup", "completep")
POLYNOMIALS = "the polynomials of the iteration, by Jordan et al. 2024 or Amsel et al. 2025"
DION_RANK = 0.25


def muon_has_a_rate(context: RuleContext) -> Iterator[Problem]:
    optimizer = context.config.optimizer
    if optimizer.lr == 0:
        yield context.problem(
            "optimizer.lr optimizer.type",
            rule="Muon's matrices follow the schedule of optimizer.lr, which must be above 0",
            fix="give the rate of the AdamW part, such as 3e-4",
        )


def per_head_has_standard_rates(context: RuleContext) -> Iterator[Problem]:
    """The norm of a stack of orthogonal heads grows with their number."""
    own, optimizer = context.config.model.parametrization, context.config.optimizer
    if own.type != "standard" and optimizer.options.get("per_head") is True:
        yield context.problem(
            "optimizer.options model.parametrization.type",
            rule=f"the rates of {own.type} must be derived for the optimizer, and are so for muon without per_head",
            fix="remove per_head, or use type: standard",
        )


def nesterov_has_momentum(context: RuleContext) -> Iterator[Problem]:
    optimizer = context.config.optimizer
    if optimizer.nesterov and optimizer.momentum == 0:
        yield context.problem(
            "optimizer.nesterov optimizer.momentum",
            rule="Nesterov momentum must go with a momentum above 0",
            fix="use optimizer.momentum=0.9, or nesterov: false",
        )


def schedule_free_has_no_schedule(context: RuleContext) -> Iterator[Problem]:
    config = context.config
    kind = config.optimizer.type
    if config.schedule.type in INSIDE[SCHEDULE] and config.schedule.type != "constant":
        yield context.problem(
            "schedule.type optimizer.type",
            rule=f"{kind} must have a constant rate after the warmup: its average of the weights takes the place of a "
            "decay",
            fix="use schedule.type=constant, with a warmup",
        )
    if config.training.weight_average is not None:
        yield context.problem(
            "training.weight_average optimizer.type",
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


ADAMW = OptimizerKind(
    update=f"{HERE}.adamw:AdamW",
    state_bytes=lambda config: 8,
    reads=("betas", "epsilon"),
    options={"cautious": CAUTIOUS},
    rates_for=RATES_FOR,
    offloads=True,
)
ADAMW_8BIT = OptimizerKind(
    update=f"{HERE}.adamw_8bit:AdamW8bit",
    state_bytes=lambda config: 2,
    reads=("betas", "epsilon"),
    options={"smallest": Option(4096, 1, 10**12, "matrices of fewer elements keep fp32 moments", whole=True)},
    rates_for=RATES_FOR,
    whole_matrices=True,
    package=Package("torchao", "optim/subclass_8bit.py", "pip install torchao"),
)
ADEMAMIX = OptimizerKind(
    update=f"{HERE}.ademamix:AdEMAMix",
    state_bytes=lambda config: 12,
    reads=("betas", "epsilon"),
    options={
        "slow": Option(0.9999, 0, 1, "coefficient of the slow average", below=True),
        "alpha": Option(5.0, 0, 1000, "weight of the slow average"),
        "warmup": Option(None, 0, 10**12, "steps until both are reached (default: training.steps)", whole=True),
    },
    rates_for=RATES_FOR,
)
SCHEDULE_FREE_ADAMW = OptimizerKind(
    update=f"{HERE}.schedule_free_adamw:ScheduleFreeAdamW",
    state_bytes=lambda config: 8,
    reads=("betas", "epsilon"),
    options={
        "power": Option(0.0, 0, 100, "step t has a weight of t^power in the average"),
        "rate_power": Option(2.0, 0, 100, "times the largest scheduled rate so far to this power"),
    },
    rates_for=RATES_FOR,
    averages=True,
    rules=(schedule_free_has_no_schedule,),
)
LION = OptimizerKind(update=f"{HERE}.lion:Lion", state_bytes=lambda config: 4, reads=("betas",), rates_for=RATES_FOR)
SGD = OptimizerKind(
    update=f"{HERE}.sgd:SGD",
    state_bytes=lambda config: 4 if config.optimizer.momentum else 0,
    reads=("momentum", "nesterov"),
    rates_for=("mup",),
    why_no_rates="its steps depend on the size of gradients",
    rules=(nesterov_has_momentum,),
)
ADAM_MINI = OptimizerKind(
    update=f"{HERE}.adam_mini:AdamMini", state_bytes=lambda config: 4, reads=("betas", "epsilon"), whole_matrices=True
)
ADAFACTOR = OptimizerKind(
    update=f"{HERE}.adafactor:Adafactor",
    state_bytes=lambda config: 8,  # of AdamW's vectors. Matrices need next to nothing
    reads=("betas", "epsilon"),
    options={
        "decay": Option(0.8, 0, 10, "the average of squares at step t has the coefficient 1 - t^-decay"),
        "clip": Option(1.0, 1e-6, 1e6, "largest root mean square of an update"),
    },
    whole_matrices=True,
)
SOAP = OptimizerKind(
    update=f"{HERE}.soap:SOAP",
    state_bytes=lambda config: 8,
    reads=("betas", "epsilon"),
    options={
        "frequency": Option(10, 1, 10**9, "steps between two refreshes of the eigenbases", whole=True),
        "largest": Option(10_000, 0, 10**9, "a longer side stays in its own basis", whole=True),
        "beta": Option(None, 0, 1, "average of the factors (default: the second of optimizer.betas)", below=True),
    },
    whole_matrices=True,
)
MUON = OptimizerKind(
    update=f"{HERE}.muon:Muon",
    state_bytes=lambda config: 4,
    reads=("betas", "epsilon", "muon_lr", "muon_momentum", "muon_scale"),
    options={
        "per_head": Option(False, 0, 1, "queries, keys and values are orthogonalised by heads", switch=True),
        "polynomials": Option("jordan", 0, 0, POLYNOMIALS, choices=("jordan", "polar_express")),
        "cautious": CAUTIOUS,
    },
    rates_for=RATES_FOR,
    whole_matrices=True,
    rules=(muon_has_a_rate, per_head_has_standard_rates),
)
NORMUON = replace(
    MUON,
    update=f"{HERE}.muon:NorMuon",
    options={**MUON.options, "beta2": Option(0.95, 0, 1, "average of the squares of each row's steps", below=True)},
)
DION = OptimizerKind(
    update=f"{HERE}.dion:Dion",
    # The momentum, and columns * rank numbers of the basis: at most 4 bytes times the share per element.
    state_bytes=lambda config: 4 + int(4 * config.optimizer.options.get("rank", DION_RANK)),
    reads=("betas", "epsilon", "muon_lr", "muon_momentum"),
    options={
        "rank": Option(DION_RANK, 1e-4, 1, "rank of a step, as a share of the shorter side of its matrix"),
        "cautious": CAUTIOUS,
    },
    rates_for=RATES_FOR,
    whole_matrices=True,
    rules=(muon_has_a_rate,),
)
