"""Facts of the losses of policy gradients."""

from collections.abc import Iterator

from megatron.config.arithmetic.recurrence import core_of
from megatron.config.features.objective_kind import ObjectiveKind
from megatron.config.optimizer_kind import Option
from megatron.config.problems import Problem
from megatron.config.routes import route_columns
from megatron.config.rule_context import RuleContext

SEQUENCE, ADVANTAGE, OLD, SAMPLER, REFERENCE = "sequence", "advantage", "old", "sampler", "reference"  # columns
TRAINER, ROLLOUTS = "trainer", "rollouts"  # a column of this source of samples
LABEL, CONSTANT, BY_SEQUENCE = "label", "constant", "sequence"  # words of `mean`

# Of each loss: its mean, clip_low and clip_high by default, and the ratio that it clips.
LOSSES: dict[str, tuple[str, float, float, str]] = {
    "reinforce": (LABEL, 0.0, 0.0, ""),
    "grpo": (BY_SEQUENCE, 0.2, 0.2, "label"),
    "gspo": (BY_SEQUENCE, 3e-4, 4e-4, "mean"),
    "rloo": (BY_SEQUENCE, 0.2, 0.2, "product"),
    "cispo": (LABEL, 0.0, 4.0, "label"),
    "dppo": (LABEL, 0.0, 0.0, "label"),
}
# Options that only some losses read.
READERS = {
    "clip_low": ("grpo", "gspo", "rloo"),
    "clip_high": ("grpo", "gspo", "rloo", "cispo"),
    "ratio_limit": ("grpo", "gspo", "rloo"),
    "trust": ("dppo",),
}


def options_have_an_effect(context: RuleContext) -> Iterator[Problem]:
    given = context.config.objective.options
    options = OBJECTIVE.options_of(context.config)
    if options["loss"] not in LOSSES:
        return  # `choices` reports it
    needs = [(name, f"loss: {' or '.join(losses)}", options["loss"] in losses) for name, losses in READERS.items()]
    needs += [(name, "beta above 0", options["beta"] > 0) for name in ("kl", "kl_ratio")]
    needs += [(name, "a correction", options["correction"] != "none") for name in ("correction_low", "correction_high")]
    needs += [("length", "mean: constant", options["mean"] == CONSTANT)]
    for name, what, holds in needs:
        if name in given and not holds:
            yield context.problem(
                "objective.options",
                rule=f"{name} must come with {what}, and would have no effect here",
                fix=f"remove {name}, or set {what}",
            )
    if options["mean"] == CONSTANT and options["length"] is None:
        yield context.problem(
            "objective.options",
            rule="mean: constant must come with length, the number of tokens that each sum is divided by",
            fix="give length, such as the longest completion",
        )
    if options["correction_low"] > options["correction_high"]:
        yield context.problem(
            "objective.options",
            rule=f"correction_low = {options['correction_low']:g} must be at most correction_high = "
            f"{options['correction_high']:g}",
            fix="exchange them",
        )


def rollouts_have_what_is_read(context: RuleContext) -> Iterator[Problem]:
    if context.config.data.synthetic == "none":
        yield context.problem(
            "data.synthetic objective.type",
            rule="must be a source of texts with advantages and log-probabilities",
            fix="use data.synthetic=rollouts with deepy align, or a source of your own that has these columns",
        )


def routes_can_be_replayed(context: RuleContext) -> Iterator[Problem]:
    config = context.config
    if not OBJECTIVE.options_of(config)["replay"]:
        return
    if not route_columns(config.model):
        yield context.problem(
            "objective.options", "model.layers", rule="replay must come with layers of experts", fix="remove replay"
        )
    # a pipeline's stages and chunks of a sequence have no columns, and a core's passes would share one record
    alone = {"parallel.pipeline": config.parallel.pipeline, "parallel.context": config.parallel.context}
    alone |= {"parallel.folded": config.parallel.folded, "training.sequence_chunks": config.training.sequence_chunks}
    for name, size in alone.items():
        if size > 1:
            yield context.problem(name, "objective.options", rule="must be 1 with replay", fix=f"use {name}=1")
    routers = [use.options.router for use in context.used if hasattr(use.options, "router")]
    choices = {router.select for router in routers}
    if choices - {"top_k", "hash"} or core_of(config.model.blocks):
        yield context.problem(
            "model.moe.router.select model.layers objective.options",
            rule="must be top_k or hash with replay, and the stack have no recurrent group",
            fix="use select: top_k, or remove replay",
        )


OBJECTIVE = ObjectiveKind(
    objective="megatron.objectives.policy.objective:Policy",
    options={
        "loss": Option("grpo", 0, 0, "of a label", choices=tuple(LOSSES)),
        "mean": Option(None, 0, 0, "over labels, sequences, or a constant", choices=(LABEL, BY_SEQUENCE, CONSTANT)),
        "length": Option(None, 1, 1e9, "tokens by which mean: constant divides a sequence's sum", whole=True),
        "clip_low": Option(None, 0, 1, "the ratio is clipped below 1 - clip_low"),
        "clip_high": Option(None, 0, 1e6, "the ratio is clipped above 1 + clip_high"),
        "ratio_limit": Option(None, 1, 1e6, "the largest ratio where the advantage is negative (dual clip)"),
        "trust": Option(0.2, 0, 1, "dppo: difference of probabilities beyond which a label is masked"),
        "beta": Option(0.0, 0, 1e6, "factor of the divergence from the reference"),
        "kl": Option("k3", 0, 0, "estimator of the divergence", choices=("k1", "k2", "k3", "abs")),
        "kl_ratio": Option(False, 0, 1, "the divergence is multiplied by the ratio", switch=True),
        "correction": Option(
            "none",
            0,
            0,
            "of the difference of sampler and trainer",
            choices=("none", "clamp", "mask", "sequence_clamp", "sequence_mask"),
        ),
        "correction_low": Option(0.0, 0, 1e6, "least weight of a correction"),
        "correction_high": Option(2.0, 0, 1e6, "largest weight of a correction"),
        "stale_limit": Option(None, 0, 1e6, "mean log(sampler / policy) beyond which bad sequences are masked"),
        "replay": Option(False, 0, 1, "tokens use the experts that were recorded for them", switch=True),
        "sequences": Option(1, 1, 65536, "texts in a sample, for a source of samples of your own", whole=True),
    },
    labels=True,
    rules=(options_have_an_effect, rollouts_have_what_is_read, routes_can_be_replayed),
)
