"""Numbers that go wrong: a policy that could not act is refused before the run needs it."""

from __future__ import annotations

from collections.abc import Iterator

from ..problems import Problem
from ..rule_context import RuleContext


def _rolling(context: RuleContext) -> str | None:
    """The key that asks for rollbacks."""
    spikes = context.config.spikes
    named = {"spikes.action": spikes.action, "spikes.non_finite": spikes.non_finite}
    return next((name for name, value in named.items() if value == "rollback"), None)


def rollback_has_checkpoints(context: RuleContext) -> Iterator[Problem]:
    rolling, checkpoint = _rolling(context), context.config.checkpoint
    if rolling is None:
        return
    saves = checkpoint.every or checkpoint.minutes or checkpoint.auto or checkpoint.steps or checkpoint.log_spaced
    if not saves:
        yield context.problem(
            rolling,
            "checkpoint.every",
            rule="rollback must have checkpoints to go back to, and nothing is saved before the end",
            fix="give checkpoint.every, or use skip",
        )
    if not checkpoint.optimizer_state:
        yield context.problem(
            rolling,
            "checkpoint.optimizer_state",
            rule="rollback must have checkpoints that can be resumed",
            fix="use checkpoint.optimizer_state=true, or skip",
        )


def rollback_keeps_old_checkpoints(context: RuleContext) -> Iterator[Problem]:
    """One from `back` steps before is there whenever the spike comes."""
    rolling, checkpoint, back = _rolling(context), context.config.checkpoint, context.config.spikes.back
    if rolling is None or not checkpoint.keep_last or not checkpoint.every or checkpoint.keep_every:
        return
    needed = -(-back // checkpoint.every) + 1
    if checkpoint.keep_last < needed:
        yield context.problem(
            "checkpoint.keep_last",
            "spikes.back",
            rule=f"must be at least {needed}, so that a checkpoint from {back} steps before a spike is still there",
            fix=f"use checkpoint.keep_last={needed}, or spikes.back of at most "
            f"{(checkpoint.keep_last - 1) * checkpoint.every}",
        )


def what_is_left_out_covers_the_spike(context: RuleContext) -> Iterator[Problem]:
    spikes = context.config.spikes
    if _rolling(context) is not None and spikes.leave_out <= spikes.back:
        yield context.problem(
            "spikes.leave_out",
            "spikes.back",
            rule="leave_out must be above back: counted from `back` steps before the spike, it has to reach the spike",
            fix=f"use spikes.leave_out={2 * spikes.back or 1}",
        )


def clipping_looks_at_the_norm(context: RuleContext) -> Iterator[Problem]:
    spikes = context.config.spikes
    if spikes.action == "clip" and spikes.watch == "loss":
        yield context.problem(
            "spikes.watch",
            "spikes.action",
            rule="clip must watch the gradient norm: that is what it clips",
            fix="use spikes.watch=grad_norm, or action: skip",
        )


def tensors_are_clipped_alike(context: RuleContext) -> Iterator[Problem]:
    config = context.config
    if config.spikes.action != "adagc":
        return
    if config.parallel.pipeline > 1 and config.model.embedding.tied:
        yield context.problem(
            "spikes.action",
            "parallel.pipeline",
            "model.embedding.tied",
            rule="adagc must not go with a tied embedding in a pipeline: both ends would clip their own copy of it",
            fix="use parallel.pipeline=1, model.embedding.tied=false, or action: clip",
        )


def window_fits_the_run(context: RuleContext) -> Iterator[Problem]:
    spikes, steps = context.config.spikes, context.config.training.steps
    if spikes.action not in ("off", "clip", "adagc") and spikes.window // 2 >= steps:
        yield context.warning(
            "spikes.window",
            "training.steps",
            rule=f"half a window, {spikes.window // 2} steps, must have passed before anything is called a spike",
            fix="use a smaller window",
        )


def hashes_see_the_state(context: RuleContext) -> Iterator[Problem]:
    training = context.config.training
    if training.hashes is None:
        if training.hashes_at_rest != "due":
            yield context.problem(
                "training.hashes_at_rest",
                "training.hashes",
                rule="must go with training.hashes, the steps after which ranks tell what they have found",
                fix="add training.hashes=100, or leave it out",
            )
        return
    for name in ("offload_optimizer", "offload_parameters"):
        if getattr(context.config.zero, name).device != "none":
            yield context.problem(
                "training.hashes",
                f"zero.{name}.device",
                rule="must be off with offloading: what is compared would have to come back to the device each time",
                fix="leave training.hashes out",
            )


def audits_can_act(context: RuleContext) -> Iterator[Problem]:
    training = context.config.training
    if training.audit_action != "report" and training.audit is None:
        yield context.problem(
            "training.audit_action",
            "training.audit",
            rule="must go with training.audit, which computes steps twice",
            fix="add training.audit=100, or leave it out",
        )


def confirmation_has_an_action(context: RuleContext) -> Iterator[Problem]:
    spikes = context.config.spikes
    if (
        spikes.confirm
        and not spikes.attribute
        and spikes.action not in ("skip", "rollback")
        and spikes.non_finite == "stop"
    ):
        yield context.problem(
            "spikes.confirm",
            "spikes.action",
            rule="confirm must go with skip or rollback: elsewhere the update is applied, and cannot be computed again",
            fix="use spikes.action=skip, or training.audit to compute steps twice",
        )


def attribution_can_restart(context: RuleContext) -> Iterator[Problem]:
    config = context.config
    if not config.spikes.attribute:
        return
    if not config.launch.restarts:
        yield context.problem(
            "spikes.attribute",
            "launch.restarts",
            rule="must go with launch.restarts: the value is computed again after a restart",
            fix="give launch.restarts, or use spikes.confirm=true, which stays in place",
        )
    checkpoint = config.checkpoint
    regular = checkpoint.every or checkpoint.minutes or checkpoint.auto or checkpoint.store_every
    if not (regular or checkpoint.steps or checkpoint.near or checkpoint.log_spaced):
        yield context.problem(
            "spikes.attribute",
            "checkpoint.every",
            rule="must have checkpoints that a restart begins from, and nothing is saved before the end",
            fix="give checkpoint.every, or checkpoint.levels",
        )
    if context.ranks == 1:
        yield context.warning(
            "spikes.attribute",
            rule="must have several places; with one rank no cause but the data shows",
            fix="use confirm",
        )
