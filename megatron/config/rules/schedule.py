"""The learning rate schedule: its parts fit into its steps, once each."""

from collections.abc import Iterator

from ..arithmetic.batches import batches_of
from ..problems import Problem
from ..registry import INSIDE, SCHEDULE
from ..rule_context import Check, RuleContext
from ..schema import Config

WARMUPS = ("warmup_steps", "warmup_tokens", "warmup_fraction")
READERS = {
    "decay_steps": ("wsd", "infinite"),
    "decay_shape": ("wsd",),
    "cooldown_steps": ("infinite",),
    "cooldown_shape": ("infinite",),
    "constant_lr_ratio": ("infinite",),
}


def warmup_is_given_once(context: RuleContext) -> Iterator[Problem]:
    given = [f"schedule.{name}" for name in WARMUPS if getattr(context.config.schedule, name) is not None]
    if len(given) > 1:
        rule = "the warmup must be given in one way: steps, tokens or a fraction"
        yield context.problem(given[1], given[0], *given[2:], rule=rule, fix="keep one of them")


def warmup(config: Config) -> tuple[str, float]:
    """The warmup's key and its length in steps."""
    schedule, training = config.schedule, config.training
    if schedule.warmup_tokens is not None:
        if training.global_batch_size is None:
            return "schedule.warmup_tokens", 0.0
        steps = batches_of(config).steps_of(schedule.warmup_tokens, training.sequence_length, schedule.start)
        return "schedule.warmup_tokens", steps
    if schedule.warmup_fraction is not None:
        return "schedule.warmup_fraction", schedule.warmup_fraction * (schedule.steps - schedule.start)
    return "schedule.warmup_steps", schedule.warmup_steps or 0


def parts_fit_into_the_schedule(context: RuleContext) -> Iterator[Problem]:
    """Warmup, cooldown and decay together are no longer than the schedule."""
    schedule = context.config.schedule
    length = schedule.steps - schedule.start
    parts = dict([warmup(context.config)])
    if schedule.type in ("wsd", "infinite"):
        parts["schedule.decay_steps"] = schedule.decay_steps or 0
    if schedule.type == "infinite":
        parts["schedule.cooldown_steps"] = schedule.cooldown_steps or 0
    parts = {name: steps for name, steps in parts.items() if steps}
    if length > 0 and sum(parts.values()) > length:
        converted = ("schedule.warmup_tokens", "schedule.warmup_fraction")
        listed = " + ".join(
            f"{name.split('.')[1]} ({steps:g} steps)" if name in converted else f"{name.split('.')[1]} {steps:g}"
            for name, steps in parts.items()
        )
        keys = [*sorted(parts, key=lambda name: -parts[name]), "schedule.steps"]
        yield context.problem(
            *keys,
            *["training.global_batch_size"] * (keys[0] == "schedule.warmup_tokens"),
            rule=f"{listed} must fit into the {length} steps of the schedule",
            fix=f"shorten them to {length} steps together, or raise schedule.steps",
        )


def decay_suits_the_schedule(context: RuleContext) -> Iterator[Problem]:
    for name, kinds in READERS.items() if context.config.schedule.type in INSIDE[SCHEDULE] else ():
        if context.config.schedule.type not in kinds and context.given(f"schedule.{name}"):
            rule = f"{name} must go with {' or '.join(kinds)}, and has no effect here"
            fix = "remove it, or change schedule.type"
            yield context.warning(f"schedule.{name} schedule.type", rule=rule, fix=fix)


def compat_starts_at_step_0(context: RuleContext) -> Iterator[Problem]:
    schedule = context.config.schedule
    for name in ("start", "initial_lr_ratio") if schedule.compat != "none" else ():
        if getattr(schedule, name):
            rule = "must be absent: GPT-NeoX's schedule starts at step 0, with its own first rate"
            fix = "remove it, or use compat: none"
            yield context.problem(f"schedule.{name} schedule.compat", rule=rule, fix=fix)


def schedule_covers_the_run(context: RuleContext) -> Iterator[Problem]:
    schedule, training = context.config.schedule, context.config.training
    steps = min(training.steps, training.stop_at_step or training.steps)  # a branch stops where its schedule ends
    if context.given("schedule.steps") and schedule.steps < steps:
        yield context.warning(
            "schedule.steps training.steps",
            rule=f"must be training.steps: the last {steps - schedule.steps} steps keep the schedule's last rate",
            fix=f"use schedule.steps={steps} if that is not meant",
        )


def _lacks_a_warmup(config: Config) -> bool:
    key, steps = warmup(config)
    unknown = key == "schedule.warmup_tokens" and config.training.global_batch_size is None
    return config.schedule.type == "inverse_sqrt" and not steps and not unknown


CHECKS = (
    Check(
        "schedule.start schedule.steps",
        lambda c: c.schedule.start >= c.schedule.steps,
        "schedule.start must be below schedule.steps",
        lambda c: f"use a start below {c.schedule.steps}",
    ),
    Check(
        lambda c: f"{warmup(c)[0]} schedule.type",
        _lacks_a_warmup,
        "inverse_sqrt must have a warmup: its length is the time scale of the decay",
        "give schedule.warmup_steps, for example 1 % of the steps",
    ),
    Check(
        "schedule.cooldown_steps schedule.type",
        lambda c: c.schedule.type == "infinite" and c.schedule.cooldown_steps is None,
        "infinite must have the steps of its cooldown",
        "give schedule.cooldown_steps (0 takes the constant rate at once)",
    ),
    Check(
        "schedule.min_lr_ratio schedule.type",
        lambda c: c.schedule.type == "infinite" and c.schedule.min_lr_ratio == 0,
        "must be above 0: infinite anneals exponentially",
        "use a value above 0, such as 0.01",
    ),
    Check(
        "schedule.constant_lr_ratio schedule.min_lr_ratio",
        lambda c: c.schedule.type == "infinite" and c.schedule.constant_lr_ratio < c.schedule.min_lr_ratio,
        "the constant rate must not be below the lowest one",
        lambda c: f"use at least {c.schedule.min_lr_ratio:g}",
    ),
    Check(
        "schedule.compat schedule.type",
        lambda c: c.schedule.compat != "none" and c.schedule.type not in ("constant", "linear", "cosine"),
        lambda c: (
            f"schedule.type must be one that GPT-NeoX{' 1.0' * (c.schedule.compat == 'neox-v1')} has, and it has no "
            f"{c.schedule.type} schedule"
        ),
        "use constant, linear or cosine, or compat: none",
    ),
    Check(  # GPT-NeoX 1.0 stops counting steps one warmup before the end: a longer warmup than the rest counts back
        lambda c: f"{warmup(c)[0]} schedule.compat schedule.steps",
        lambda c: (
            c.schedule.compat == "neox-v1" and c.schedule.type != "constant" and 2 * warmup(c)[1] > c.schedule.steps
        ),
        "warmup must be at most half the schedule, or GPT-NeoX 1.0 can go above the peak learning rate",
        "shorten the warmup, or use compat: none",
        fatal=False,
    ),
    Check(  # today's GPT-NeoX gives the first update the rate of step 1, over a warmup that may be shorter than a step
        lambda c: f"{warmup(c)[0]} schedule.compat",
        lambda c: c.schedule.compat == "neox" and 0 < warmup(c)[1] < 1,
        lambda c: (
            f"must be at least one step: {warmup(c)[1]:g} makes GPT-NeoX's first rate {1 / warmup(c)[1]:g} times the "
            "peak"
        ),
        "use a warmup of at least one step, or none",
        fatal=False,
    ),
)
