"""Facts of reward models."""

from collections.abc import Iterator

from megatron.config.features.objective_kind import ObjectiveKind, validation_is_given
from megatron.config.optimizer_kind import Option
from megatron.config.problems import Problem
from megatron.config.rule_context import RuleContext


def answers_are_apart(context: RuleContext) -> Iterator[Problem]:
    data = context.config.data
    if not context.config.training.steps:  # an import trains nothing
        return
    if data.synthetic == "none":
        yield context.problem(
            "data.synthetic objective.type",
            rule="must be a source of pairs of answers",
            fix="use data.synthetic=reward_pairs, with data.options={chosen: ..., rejected: ...}",
        )
    if not data.reset_attention_at_eod:
        yield context.problem(
            "data.reset_attention_at_eod objective.type",
            rule="must be true with a reward model: both answers are in one sample",
            fix="use data.reset_attention_at_eod=true",
        )
    subtracts = OBJECTIVE.options_of(context.config)["margins"]
    if data.synthetic == "reward_pairs" and subtracts != ("margins" in data.options):
        yield context.problem(
            "objective.options data.options",
            rule="objective.options.margins must be true if data.options has margins, and only then",
            fix="set objective.options.margins=true and data.options.margins, or neither",
        )
    if data.synthetic == "reward_pairs":
        yield from validation_is_given(context, "pairs", "{chosen: ..., rejected: ...}")


def nothing_reads_logits(context: RuleContext) -> Iterator[Problem]:
    evaluation = context.config.evaluation
    for name, used in (("tasks", evaluation.tasks), ("probes", evaluation.probes)):
        if used:
            rule = "must be empty with a reward model, which has no logits"
            yield context.problem(f"evaluation.{name} objective.type", rule=rule, fix=f"remove evaluation.{name}")
    if evaluation.samples.every is not None:
        rule = "must be null with a reward model, which has no logits to draw texts from"
        yield context.problem("evaluation.samples.every objective.type", rule=rule, fix="remove it")


def head_is_trained(context: RuleContext) -> Iterator[Problem]:
    if context.option("adapter.type") not in (None, "none"):
        rule = "must be none with a reward model, whose new head would stay at its random start"
        yield context.problem("adapter.type objective.type", rule=rule, fix="use adapter.type=none")


OBJECTIVE = ObjectiveKind(
    objective="megatron.objectives.reward_model.objective:RewardModel",
    options={
        "margins": Option(False, 0, 1, "subtract the margin of each pair (data.options.margins)", switch=True),
        "centre": Option(0.0, 0, 1e6, "factor of the squared sum of both values, which keeps them around 0"),
        "squares": Option(0.0, 0, 1e6, "factor of the sum of both squared values, GPT-NeoX's z_loss"),
    },
    labels=True,
    rules=(answers_are_apart, nothing_reads_logits, head_is_trained),
)
