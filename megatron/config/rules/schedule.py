"""The learning rate schedule: its parts fit into its steps, once each."""

from __future__ import annotations

from collections.abc import Iterator

from ..problems import Problem
from ..registry import INSIDE, SCHEDULE
from ..rule_context import RuleContext

WARMUPS = ("warmup_steps", "warmup_tokens", "warmup_fraction")


def warmup_is_given_once(context: RuleContext) -> Iterator[Problem]:
    given = [f"schedule.{name}" for name in WARMUPS if getattr(context.config.schedule, name) is not None]
    if len(given) > 1:
        yield context.problem(
            given[1],
            given[0],
            *given[2:],
            rule="the warmup must be given in one way: steps, tokens or a fraction",
            fix="keep one of them",
        )


def warmup(context: RuleContext) -> tuple[str, float]:
    """The warmup's key and its length in steps."""
    schedule, training = context.config.schedule, context.config.training
    if schedule.warmup_tokens is not None:
        per_step = (training.global_batch_size or 0) * training.sequence_length
        return "schedule.warmup_tokens", schedule.warmup_tokens / per_step if per_step else 0.0
    if schedule.warmup_fraction is not None:
        return "schedule.warmup_fraction", schedule.warmup_fraction * (schedule.steps - schedule.start)
    return "schedule.warmup_steps", schedule.warmup_steps or 0


def schedule_starts_before_its_end(context: RuleContext) -> Iterator[Problem]:
    schedule = context.config.schedule
    if schedule.start >= schedule.steps:
        yield context.problem(
            "schedule.start",
            "schedule.steps",
            rule="schedule.start must be below schedule.steps",
            fix=f"use a start below {schedule.steps}",
        )


def parts_fit_into_the_schedule(context: RuleContext) -> Iterator[Problem]:
    """Warmup, cooldown and decay together are no longer than the schedule."""
    schedule = context.config.schedule
    length = schedule.steps - schedule.start
    key, steps = warmup(context)
    parts = {key: steps}
    if schedule.type in ("wsd", "infinite"):
        parts["schedule.decay_steps"] = schedule.decay_steps or 0
    if schedule.type == "infinite":
        parts["schedule.cooldown_steps"] = schedule.cooldown_steps or 0
    if length > 0 and sum(parts.values()) > length:
        converted = ("schedule.warmup_tokens", "schedule.warmup_fraction")
        listed = " + ".join(
            f"{name.split('.')[1]} ({value:g} steps)" if name in converted else f"{name.split('.')[1]} {value:g}"
            for name, value in parts.items()
            if value
        )
        first, *others = sorted((name for name, value in parts.items() if value), key=lambda name: -parts[name])
        keys = ["training.global_batch_size"] if first == "schedule.warmup_tokens" else []
        yield context.problem(
            first,
            *others,
            "schedule.steps",
            *keys,
            rule=f"{listed} must fit into the {length} steps of the schedule",
            fix=f"shorten them to {length} steps together, or raise schedule.steps",
        )


def decay_suits_the_schedule(context: RuleContext) -> Iterator[Problem]:
    users = {
        "decay_steps": ("wsd", "infinite"),
        "decay_shape": ("wsd",),
        "cooldown_steps": ("infinite",),
        "cooldown_shape": ("infinite",),
        "constant_lr_ratio": ("infinite",),
    }
    for name, kinds in users.items() if context.config.schedule.type in INSIDE[SCHEDULE] else ():
        if context.config.schedule.type not in kinds and context.given(f"schedule.{name}"):
            yield context.warning(
                f"schedule.{name}",
                "schedule.type",
                rule=f"{name} must go with {' or '.join(kinds)}; it has no effect here",
                fix="remove it, or change schedule.type",
            )


def inverse_sqrt_has_a_warmup(context: RuleContext) -> Iterator[Problem]:
    key, steps = warmup(context)
    if (
        context.config.schedule.type == "inverse_sqrt"
        and not steps
        and not (key == "schedule.warmup_tokens" and context.config.training.global_batch_size is None)
    ):
        yield context.problem(
            key,
            "schedule.type",
            rule="inverse_sqrt must have a warmup: its length is the time scale of the decay",
            fix="give schedule.warmup_steps, for example 1 % of the steps",
        )


def infinite_is_complete(context: RuleContext) -> Iterator[Problem]:
    schedule = context.config.schedule
    if schedule.type != "infinite":
        return
    if schedule.cooldown_steps is None:
        yield context.problem(
            "schedule.cooldown_steps",
            "schedule.type",
            rule="infinite must have the steps of its cooldown",
            fix="give schedule.cooldown_steps (0 goes to the constant rate at once)",
        )
    if schedule.min_lr_ratio == 0:
        yield context.problem(
            "schedule.min_lr_ratio",
            "schedule.type",
            rule="must be above 0: infinite anneals exponentially",
            fix="use a value above 0, such as 0.01",
        )
    if schedule.constant_lr_ratio < schedule.min_lr_ratio:
        yield context.problem(
            "schedule.constant_lr_ratio",
            "schedule.min_lr_ratio",
            rule="the constant rate must not be below the lowest one",
            fix=f"use at least {schedule.min_lr_ratio:g}",
        )


def compat_has_its_own_schedules(context: RuleContext) -> Iterator[Problem]:
    schedule = context.config.schedule
    if schedule.compat == "none":
        return
    if schedule.type not in ("constant", "linear", "cosine"):
        theirs = "GPT-NeoX 1.0" if schedule.compat == "neox-v1" else "GPT-NeoX"
        yield context.problem(
            "schedule.compat",
            "schedule.type",
            rule=f"schedule.type must be one that {theirs} has, and it has no {schedule.type} schedule",
            fix="use constant, linear or cosine, or compat: none",
        )
    for name in ("start", "initial_lr_ratio"):
        if getattr(schedule, name):
            yield context.problem(
                f"schedule.{name}",
                "schedule.compat",
                rule="must be left out: GPT-NeoX's schedule starts at step 0, with its own first rate",
                fix="remove it, or use compat: none",
            )


def compat_stays_below_the_peak(context: RuleContext) -> Iterator[Problem]:
    """GPT-NeoX 1.0 stops counting steps one warmup before the end: a longer warmup than the rest counts back."""
    schedule = context.config.schedule
    key, steps = warmup(context)
    if schedule.compat == "neox-v1" and schedule.type != "constant" and 2 * steps > schedule.steps:
        yield context.warning(
            key,
            "schedule.compat",
            "schedule.steps",
            rule="warmup must be at most half the schedule, or GPT-NeoX 1.0 can go above the peak learning rate",
            fix="shorten the warmup, or use compat: none",
        )


def compat_has_a_whole_step_of_warmup(context: RuleContext) -> Iterator[Problem]:
    """Today's GPT-NeoX gives the first update the rate of step 1, over a warmup that may be shorter than a step."""
    key, steps = warmup(context)
    if context.config.schedule.compat == "neox" and 0 < steps < 1:
        yield context.warning(
            key,
            "schedule.compat",
            rule=f"must be at least one step: {steps:g} makes GPT-NeoX's first rate {1 / steps:g} times the peak",
            fix="use a warmup of at least one step, or none",
        )


def schedule_covers_the_run(context: RuleContext) -> Iterator[Problem]:
    schedule, steps = context.config.schedule, context.config.training.steps
    if context.given("schedule.steps") and schedule.steps < steps:
        yield context.warning(
            "schedule.steps",
            "training.steps",
            rule=f"must be training.steps: the last {steps - schedule.steps} steps keep the schedule's last rate",
            fix=f"use schedule.steps={steps} if that is not meant",
        )
