"""Keys and rules about losses and gradients that jump or are not finite, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from megatron.config.arithmetic.wire import FEEDS_BACK
from megatron.config.features.feature import Feature, Keys, wanted_features
from megatron.config.section import Section, key

if TYPE_CHECKING:
    from megatron.config.problems import Problem
    from megatron.config.rule_context import RuleContext
    from megatron.parallel.layout.layout import Layout

ADAGC = "adagc"  # a word of `spikes.action`
NAME = "spikes"  # of the feature and its engine part


class SpikeClipSection(Section):
    """ZClip (arXiv 2504.02507)."""

    z: float = key(2.5, "action clip: standard deviations above the mean from which gradient norms are clipped.", gt=0)
    decay: float = key(0.97, "Decay of the running mean and variance of the norms.", gt=0, lt=1)
    warmup: int = key(25, "Norms that the first mean and variance are taken of.", unit="steps", ge=2)


class AdaGCSection(Section):
    """AdaGC (arXiv 2502.11034)."""

    threshold: float = key(1.05, "action adagc: clip gradients from this ratio of norm to moving norm.", gt=0)
    decay: float = key(0.98, "Decay of the moving norms.", gt=0, lt=1)
    warmup: int = key(
        100,
        "The first steps, in which the global norm is clipped (optimizer.gradient_clipping), and the moving norms are "
        "the least so far.",
        unit="steps",
        ge=1,
    )


class SpikesSection(Section):
    action: Literal["off", "report", "skip", "clip", "adagc", "rollback"] = key(
        "off",
        "Action at a spike. report: log it. skip: skip the update. clip: clip its gradient harder (ZClip). adagc: clip "
        "each tensor by its own history (AdaGC). rollback: return to a checkpoint and skip batches (PaLM).",
    )
    non_finite: Literal["stop", "skip", "rollback"] = key(
        "stop", "The same for a loss or gradient norm that is infinite or no number. fp16 overflows are no spikes."
    )
    watch: Literal["both", "loss", "grad_norm"] = key("both", "The numbers that are checked.")
    window: int = key(128, "Steps that the mean and the standard deviation are taken over.", unit="steps", ge=4)
    sigma: float = key(6.0, "Number of standard deviations above the mean that counts as a spike.", gt=0)
    limit: int = key(10, "Most actions within `within` steps, or most rollbacks of a run. Then the run stops.", gt=0)
    within: int = key(1000, "See limit.", unit="steps", gt=0)
    back: int = key(100, "rollback: skip batches from this number of steps before the spike.", unit="steps", ge=0)
    leave_out: int = key(200, "rollback: number of batches to skip.", unit="batches", gt=0)
    confirm: bool = key(False, "skip and rollback: compute the step of a spike again. The second result counts.")
    attribute: bool = key(
        False,
        "Includes confirm. If the second result is bad too, compute it once more after a restart with every rank in "
        "another place. Then the cause is either the data or the place.",
    )
    clip: SpikeClipSection = key(SpikeClipSection, "action clip.")
    adagc: AdaGCSection = key(AdaGCSection, "action adagc.")

    @property
    def judges(self) -> bool:
        """Whether a run checks its updates before it applies them."""
        return self.action != "off" or self.non_finite != "stop" or self.attribute


class SpikesKeys(Section):
    spikes: SpikesSection = key(SpikesSection, "Actions at losses and gradients that jump.")


TOP = Keys("", SpikesKeys, after="watch")


def spikes_of(config: Any) -> SpikesSection:
    return TOP.of(config).spikes


def meets_early(config: Any, layout: Layout) -> bool:
    """Whether ranks exchange the numbers of a step while its gradients are computed, without their norm.

    They can if they only differ in their part of the batch: their sums of gradients then have the same bits, and so
    has everything computed from them. Steps that are computed twice exchange the second result."""
    spikes, alike = spikes_of(config), layout.tensor == layout.pipeline == layout.expert == 1
    again = any(NAME in feature.needs(config) for feature in wanted_features(config).values())
    return spikes.judges and alike and not (spikes.confirm or spikes.attribute or again)


def exchanges_norm(config: Any, layout: Layout) -> bool:
    """Whether rank 0 sends the gradient norm of each step to the others, so that all decide by the same bits."""
    return spikes_of(config).judges and not meets_early(config, layout)


def _skipped_batches(config: Any) -> int:
    spikes = spikes_of(config)
    return spikes.limit * spikes.leave_out if "rollback" in (spikes.action, spikes.non_finite) else 0


def _traffic(config: Any) -> tuple[()] | str:
    clips_tensors = spikes_of(config).action == ADAGC
    return "gradients clipped by tensor (spikes.action: adagc)" if clips_tensors else ()


def _rolling(context: RuleContext) -> str | None:
    spikes = spikes_of(context.config)
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
    """A checkpoint from `back` steps before a spike always exists."""
    rolling, checkpoint, back = _rolling(context), context.config.checkpoint, spikes_of(context.config).back
    if rolling is None or not checkpoint.keep_last or not checkpoint.every or checkpoint.keep_every:
        return
    needed = -(-back // checkpoint.every) + 1
    if checkpoint.keep_last < needed:
        yield context.problem(
            "checkpoint.keep_last spikes.back",
            rule=f"must be at least {needed}, so that a checkpoint from {back} steps before a spike is still there",
            fix=f"use checkpoint.keep_last={needed}, or spikes.back of at most "
            f"{(checkpoint.keep_last - 1) * checkpoint.every}",
        )


def skipped_batches_reach_the_spike(context: RuleContext) -> Iterator[Problem]:
    spikes = spikes_of(context.config)
    if _rolling(context) is not None and spikes.leave_out <= spikes.back:
        yield context.problem(
            "spikes.leave_out spikes.back",
            rule="leave_out must be above back: counted from `back` steps before the spike, it has to reach the spike",
            fix=f"use spikes.leave_out={2 * spikes.back or 1}",
        )


def clipping_looks_at_the_norm(context: RuleContext) -> Iterator[Problem]:
    spikes = spikes_of(context.config)
    if spikes.action == "clip" and spikes.watch == "loss":
        yield context.problem(
            "spikes.watch spikes.action",
            rule="clip must watch the gradient norm, since it clips the gradient",
            fix="use spikes.watch=grad_norm, or action: skip",
        )


def tensors_are_clipped_alike(context: RuleContext) -> Iterator[Problem]:
    config = context.config
    if spikes_of(config).action != "adagc":
        return
    if config.parallel.pipeline > 1 and config.model.embedding.tied:
        yield context.problem(
            "spikes.action parallel.pipeline model.embedding.tied",
            rule="adagc must not go with a tied embedding in a pipeline: both ends would clip their own copy of it",
            fix="use parallel.pipeline=1, model.embedding.tied=false, or action: clip",
        )


def window_fits_the_run(context: RuleContext) -> Iterator[Problem]:
    spikes, steps = spikes_of(context.config), context.config.training.steps
    if spikes.action not in ("off", "clip", "adagc") and spikes.window // 2 >= steps:
        yield context.warning(
            "spikes.window training.steps",
            rule=f"half a window, {spikes.window // 2} steps, must have passed before anything is called a spike",
            fix="use a smaller window",
        )


def confirmation_has_an_action(context: RuleContext) -> Iterator[Problem]:
    spikes = spikes_of(context.config)
    if (
        spikes.confirm
        and not spikes.attribute
        and spikes.action not in ("skip", "rollback")
        and spikes.non_finite == "stop"
    ):
        yield context.problem(
            "spikes.confirm spikes.action",
            rule="confirm must go with skip or rollback: elsewhere the update is applied, and cannot be computed again",
            fix="use spikes.action=skip, or training.audit to compute steps twice",
        )


def attribution_can_restart(context: RuleContext) -> Iterator[Problem]:
    config = context.config
    if not spikes_of(config).attribute:
        return
    if not config.launch.restarts:
        yield context.problem(
            "spikes.attribute launch.restarts",
            rule="must go with launch.restarts: the value is computed again after a restart",
            fix="give launch.restarts, or use spikes.confirm=true, which stays in place",
        )
    checkpoint = config.checkpoint
    regular = checkpoint.every or checkpoint.minutes or checkpoint.auto or checkpoint.store_every
    if not (regular or checkpoint.steps or checkpoint.near or checkpoint.log_spaced):
        yield context.problem(
            "spikes.attribute checkpoint.every",
            rule="must have checkpoints that a restart begins from, and nothing is saved before the end",
            fix="give checkpoint.every, or checkpoint.levels",
        )
    if context.ranks == 1:
        yield context.warning(
            "spikes.attribute",
            rule="must have several places: with one rank only the data can be found as a cause",
            fix="use confirm",
        )


def attribution_compares_losses(context: RuleContext) -> Iterator[Problem]:
    """The error feedback of compressed gradients is not in checkpoints, so the same step differs after a restart."""
    key = "parallel.communication.compress.data"
    if context.value(key) in FEEDS_BACK and context.replicas != 1 and spikes_of(context.config).attribute:
        yield context.problem(
            key,
            "spikes.attribute",
            rule=f"must not be {' or '.join(FEEDS_BACK)} where losses before and after a restart are compared",
            fix="use compress.data=bf16, or spikes.attribute=false",
        )


FEATURE = Feature(
    about="Judges updates before they are applied.",
    wanted=lambda config: spikes_of(config).judges,
    keys=(TOP,),
    rules=(
        attribution_can_restart,
        attribution_compares_losses,
        confirmation_has_an_action,
        rollback_has_checkpoints,
        rollback_keeps_old_checkpoints,
        skipped_batches_reach_the_spike,
        clipping_looks_at_the_norm,
        tensors_are_clipped_alike,
        window_fits_the_run,
    ),
    # The gate replaces the optimizer's `step`, so it comes before DeepSpeed takes the optimizer. In `after_update` it
    # decides whether there was an update, so it comes before all parts that only act after one.
    engine="megatron.features.spikes.gate:StepGate",
    before=("lengths", "documents", "layer_progress", "experts"),
    hook="megatron.features.spikes.hook:SpikesHook",
    hook_before=("stop",),
    traffic=_traffic,
    skips_updates=lambda config: spikes_of(config).judges,
    skipped_batches=_skipped_batches,
    clips=lambda config: spikes_of(config).action == ADAGC,
    shares=exchanges_norm,
)
