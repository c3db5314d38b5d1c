"""Facts of the goldfish loss."""

from collections.abc import Iterator

from megatron.config.features.objective_kind import ObjectiveKind
from megatron.config.problems import Problem
from megatron.config.rule_context import RuleContext
from megatron.config.rules.data import no_tokenizer


def windows_fit_the_sequence(context: RuleContext) -> Iterator[Problem]:
    objective, length = context.config.objective, context.config.training.sequence_length
    needs = objective.k if objective.mask == "static" else objective.h
    if needs > length:
        yield context.problem(
            f"objective.{'k' if objective.mask == 'static' else 'h'} training.sequence_length",
            rule=f"must be at most the {length} tokens of training.sequence_length, or no label would be masked",
            fix="use objective.k=4 and objective.h=13, as the paper does, with longer sequences",
        )


def documents_have_an_end(context: RuleContext) -> Iterator[Problem]:
    config = context.config
    hashed = config.objective.mask == "hashed" and config.data.synthetic == "none"
    if hashed and config.tokenizer.eod_id is None and no_tokenizer(context):
        yield context.problem(
            "objective.type tokenizer.path tokenizer.eod_id",
            rule="the end-of-document token must be known, since a label is masked by the tokens of its own document",
            fix="give tokenizer.eod_id, or tokenizer.path",
        )


OBJECTIVE = ObjectiveKind(
    objective="megatron.objectives.goldfish.objective:Goldfish",
    reads=("k", "h", "mask"),
    rules=(windows_fit_the_sequence, documents_have_an_end),
)
