"""Facts of the losses of preference pairs."""

from collections.abc import Iterator

from megatron.config.features.objective_kind import ObjectiveKind, validation_is_given
from megatron.config.optimizer_kind import Option
from megatron.config.problems import Problem
from megatron.config.rule_context import RuleContext

SEQUENCE, REFERENCE = "sequence", "reference"  # columns
PAIRS = 2  # sequences of a pair
ORPO = "orpo"  # a word of `objective.options.loss`


def smoothing_has_an_effect(context: RuleContext) -> Iterator[Problem]:
    options = OBJECTIVE.options_of(context.config)
    for name, losses in (("label_smoothing", ("sigmoid", "robust")), ("margin", ("sigmoid", "robust", "hinge"))):
        if options[name] and options["loss"] not in losses:
            yield context.problem(
                "objective.options",
                rule=f"{name} must go with loss: {' or '.join(losses)}, and loss is {options['loss']}",
                fix=f"remove {name}, or change loss",
            )


def answers_do_not_see_each_other(context: RuleContext) -> Iterator[Problem]:
    if not context.config.data.reset_attention_at_eod:
        yield context.problem(
            "data.reset_attention_at_eod objective.type",
            rule="must be true with preference pairs: both answers are in one sample",
            fix="use data.reset_attention_at_eod=true",
        )


def pairs_have_what_is_read(context: RuleContext) -> Iterator[Problem]:
    data, options = context.config.data, OBJECTIVE.options_of(context.config)
    if data.synthetic == "none":
        yield context.problem(
            "data.synthetic objective.type",
            rule="must be a source of preference pairs",
            fix="use data.synthetic=pairs, with data.options={chosen: ..., rejected: ...}",
        )
    elif (
        data.synthetic == "pairs"
        and not (options["reference_free"] or options["loss"] == ORPO)
        and "chosen_reference" not in data.options
    ):
        yield context.problem(
            "data.options objective.options",
            rule="must have chosen_reference and rejected_reference, log-probabilities that a reference model gives",
            fix="give both files, or use reference_free: true",
        )
    if data.synthetic == "pairs":
        yield from validation_is_given(context, "pairs", "{chosen: ..., rejected: ...}")


OBJECTIVE = ObjectiveKind(
    objective="megatron.objectives.dpo.objective:PreferencePairs",
    options={
        "loss": Option("sigmoid", 0, 0, "of a pair", choices=("sigmoid", "robust", "ipo", "hinge", ORPO)),
        "beta": Option(0.1, 1e-6, 1e6, "factor of the difference of log-probabilities"),
        "label_smoothing": Option(0.0, 0, 0.5, "probability that a preference is the wrong way round", below=True),
        "margin": Option(0.0, 0, 1e6, "subtracted from beta * Delta"),
        "average": Option(False, 0, 1, "means over labels in place of sums", switch=True),
        "reference_free": Option(False, 0, 1, "without a reference", switch=True),
        "pairs": Option(1, 1, 4096, "pairs in a sample", whole=True),
        "sft_weight": Option(None, 0, 1e6, "factor of the mean cross-entropy of chosen labels"),
    },
    labels=True,
    rules=(smoothing_has_an_effect, answers_do_not_see_each_other, pairs_have_what_is_read),
)
