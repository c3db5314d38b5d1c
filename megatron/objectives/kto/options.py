"""Facts of KTO."""

from collections.abc import Iterator

from megatron.config.features.objective_kind import ObjectiveKind, validation_is_given
from megatron.config.optimizer_kind import Option
from megatron.config.problems import Problem
from megatron.config.rule_context import RuleContext


def answers_have_what_is_read(context: RuleContext) -> Iterator[Problem]:
    data, options = context.config.data, OBJECTIVE.options_of(context.config)
    if data.synthetic == "none":
        yield context.problem(
            "data.synthetic objective.type",
            rule="must be a source of rated answers",
            fix="use data.synthetic=rated, with data.options={answers: ..., rewards: ...}",
        )
    if data.synthetic != "rated":
        return
    needed = ["answers", "rewards", "answers_reference", *(["mismatched"] if options["kl"] else [])]
    if missing := [key for key in needed if key not in data.options]:
        fix = "give them. deepy data mismatch makes mismatched answers, and kl: false needs none"
        yield context.problem("data.options objective.type", rule=f"must have {', '.join(missing)}", fix=fix)
    yield from validation_is_given(context, "answers", "{answers: ...}")


def weights_are_those_that_train(context: RuleContext) -> Iterator[Problem]:
    if context.config.optimizer.type == "schedule_free_adamw" and OBJECTIVE.options_of(context.config)["kl"]:
        rule = "must have one set of weights with kl: true, and schedule_free_adamw evaluates another than it trains"
        yield context.problem("optimizer.type objective.options", rule=rule, fix="use adamw, or kl: false")


OBJECTIVE = ObjectiveKind(
    objective="megatron.objectives.kto.objective:KTO",
    options={
        "beta": Option(0.1, 1e-6, 1e6, "factor of log(policy / reference) of an answer"),
        "desirable_weight": Option(1.0, 0, 1e6, "factor of the loss of answers with a reward above 0"),
        "undesirable_weight": Option(1.0, 0, 1e6, "factor of the loss of other answers"),
        "kl": Option(True, 0, 1, "subtract the divergence from the reference, of mismatched answers", switch=True),
    },
    labels=True,
    rules=(answers_have_what_is_read, weights_are_those_that_train),
)
