"""Learning rate schedules in closed form: the rate of a step is a function of the configuration and the step.

`lr(step)` is the rate of the update that starts from `step` completed updates (the first update is step 0). A warmup
from nothing therefore gives the first update a rate of `initial_lr_ratio` times the peak, as in GPT-NeoX, Megatron and
transformers. After the end the last rate stays. Without torch, so that tools draw schedules fast.

Sources: cosine and linear, Loshchilov & Hutter 2017. Inverse square root, Vaswani et al. 2017. wsd (warmup, stable,
decay), Hu et al. 2024. infinite (warmup, cooldown, constant, annealing), Ibrahim et al. 2024, arXiv 2403.08763."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from megatron.config import Config
from megatron.config.arithmetic.batches import batches_of
from megatron.config.parts import resolve_import
from megatron.config.problems import UserError
from megatron.config.registry import INSIDE, SCHEDULE
from megatron.config.sections.recipe import ScheduleSection

# Remaining share of the way from the peak to the floor after a share r of a decay: from 1 to 0.
DECAYS = {
    "linear": lambda r: 1 - r,
    "sqrt": lambda r: 1 - math.sqrt(r),
    "cosine": lambda r: (1 + math.cos(math.pi * r)) / 2,
    "exponential": lambda r: 2 * 0.5**r - 1,
}


@dataclass(frozen=True)
class SchedulePeriods:
    """The lengths of a schedule, in steps. The warmup may end between two steps (a share, or a number of tokens)."""

    start: int
    length: int
    warmup: float
    cooldown: int
    decay: int

    @classmethod
    def of(cls, config: Config) -> "SchedulePeriods":
        """Raises ValueError for an unresolved configuration without an end or a decay length."""
        schedule = config.schedule
        if schedule.steps is None:
            raise ValueError("schedule.steps has no value: resolve the configuration first")
        if schedule.type in ("wsd", "infinite") and schedule.decay_steps is None:
            raise ValueError("schedule.decay_steps has no value: resolve the configuration first")
        length = schedule.steps - schedule.start
        cooldown, decay = schedule.cooldown_steps or 0, schedule.decay_steps or 0
        return cls(schedule.start, length, _warmup(config, length), cooldown, decay)


def _warmup(config: Config, length: int) -> float:
    schedule = config.schedule
    if schedule.warmup_tokens is not None:
        length = config.training.sequence_length
        return batches_of(config).steps_of(schedule.warmup_tokens, length, schedule.start)
    if schedule.warmup_fraction is not None:
        return schedule.warmup_fraction * length
    return float(schedule.warmup_steps or 0)


def _tokens_read(config: Config) -> Callable[[int], int]:
    start, batches, length = config.schedule.start, batches_of(config), config.training.sequence_length
    return lambda n: (batches.before(start + n) - batches.before(start)) * length


class Shape(Protocol):
    """A function named by `schedule.type`: one of this file, or of a user's package.

    The schedule itself handles the warmup before it and the last rate after it. It must be a function of its
    arguments only, so that a resumed run continues as if never stopped."""

    def __call__(self, n: int, peak: float, span: SchedulePeriods, options: ScheduleSection) -> float:
        """The learning rate of step n of the schedule, counted from `schedule.start`, at least 0.

        Args:
            n: from `span.warmup` to `span.length`.
            peak: the rate at the end of the warmup. The result must be proportional to it.
            span: the lengths of the schedule.
            options: the section `schedule`. Its `options` belong to a user's own schedule.
        """


class Schedule:
    """The learning rate of each step of a resolved `Config`. Its rules have checked that the schedule's parts fit."""

    def __init__(self, config: Config) -> None:
        self.options = config.schedule
        self._shape: Shape = resolve_import(config, "schedule.type", SCHEDULE, config.schedule.type)
        self.peak = config.optimizer.lr
        self.span = SchedulePeriods.of(config)
        grows = config.schedule.warmup_tokens is not None and config.training.batch_schedule
        self._warmed = _tokens_read(config) if grows else None
        if self.options.type not in INSIDE[SCHEDULE]:  # mistakes in the options of a user's own are found at the start
            rate = self._shape(self.span.length, 1.0, self.span, self.options)
            if isinstance(rate, bool) or not isinstance(rate, int | float) or not math.isfinite(rate) or rate < 0:
                raise UserError(f"schedule.type = {self.options.type!r} must give rates of at least 0, not {rate!r}")

    def lr(self, step: int) -> float:
        """The learning rate of update `step`, at least 0.

        Raises:
            ValueError: the step is before the schedule's start.
        """
        return self._rate(step, self.peak)

    def multiplier(self, step: int) -> float:
        """The learning rate of update `step` as a share of the peak."""
        return self._rate(step, 1.0)

    def _rate(self, step: int, peak: float) -> float:
        n = step - self.span.start
        if n < 0:
            raise ValueError(
                f"schedule.start: the schedule begins at step {self.span.start} and has no rate for step {step}. "
                "Start the run from a checkpoint of that step or later, or lower schedule.start"
            )
        if self.options.compat == "neox-v1":
            return self._neox_v1(n, peak)
        n = min(n, self.span.length)
        if self.options.compat == "neox":
            return self._neox(n, peak)
        if n < self.span.warmup:
            initial = self.options.initial_lr_ratio
            read, warmup = self._warmed, self.options.warmup_tokens
            done, whole = (n, self.span.warmup) if read is None or warmup is None else (read(n), warmup)
            return peak * (initial + (1 - initial) * done / whole)
        return self._shape(n, peak, self.span, self.options)

    def _neox(self, n: int, peak: float) -> float:
        """GPT-NeoX since August 2023, and its first update since May 2026: the rate of step 1 instead of 0.

        The linear decay goes to 0 and the floor cuts it off. After the end the last rate stays. GPT-NeoX's own
        cosine rises again there."""
        warmup, floor = self.span.warmup, self.options.min_lr_ratio * peak
        if 0 < warmup and n <= warmup:
            return peak * max(1, n) / warmup
        share = _share(n, self.span)
        rates = {
            "constant": peak,
            "linear": peak * (1 - share),
            "cosine": floor + (peak - floor) / 2 * (math.cos(math.pi * share) + 1),
        }
        return max(rates[self.options.type], floor)

    def _neox_v1(self, n: int, peak: float) -> float:
        """GPT-NeoX 1.0, with which Pythia was trained.

        The decay is stretched over all steps instead of those after the warmup, and the count of steps stops one warmup
        before the end. The floor is a clamp: Pythia's cosine meets it near step 115,140 and stays there."""
        end, warmup = self.span.length, self.span.warmup
        counted = min(n, end - warmup)
        if 0 < warmup and n <= warmup:
            return peak * counted / warmup
        after = counted - warmup
        rates = {
            "constant": peak,
            "linear": peak * (end - after) / end,
            "cosine": peak / 2 * (math.cos(math.pi * after / end) + 1),
        }
        return max(rates[self.options.type], self.options.min_lr_ratio * peak)


def _fall(shape: str, share: float, peak: float, options: ScheduleSection) -> float:
    low = options.min_lr_ratio * peak
    return low + (peak - low) * DECAYS[shape](share)


def _share(n: float, span: SchedulePeriods) -> float:
    return (n - span.warmup) / max(span.length - span.warmup, 1e-9)


# The shapes after the warmup: the rate of step n of the schedule (warmup <= n <= length), by the contract of `Shape`.


def constant(n: int, peak: float, span: SchedulePeriods, options: ScheduleSection) -> float:
    return peak


def linear(n: int, peak: float, span: SchedulePeriods, options: ScheduleSection) -> float:
    return _fall("linear", _share(n, span), peak, options)


def cosine(n: int, peak: float, span: SchedulePeriods, options: ScheduleSection) -> float:
    return _fall("cosine", _share(n, span), peak, options)


def wsd(n: int, peak: float, span: SchedulePeriods, options: ScheduleSection) -> float:
    begin = span.length - span.decay
    return peak if n <= begin else _fall(options.decay_shape, (n - begin) / span.decay, peak, options)


def inverse_sqrt(n: int, peak: float, span: SchedulePeriods, options: ScheduleSection) -> float:
    return max(peak * math.sqrt(span.warmup / n), options.min_lr_ratio * peak)


def infinite(n: int, peak: float, span: SchedulePeriods, options: ScheduleSection) -> float:
    low, begin = options.constant_lr_ratio * peak, span.length - span.decay
    if n > begin:
        return low * (options.min_lr_ratio / options.constant_lr_ratio) ** ((n - begin) / span.decay)
    if n >= span.warmup + span.cooldown:
        return low
    x = (n - span.warmup) / span.cooldown
    if options.cooldown_shape == "cosine":
        return low + (peak - low) * DECAYS["cosine"](x)
    # The paper's inverse square root has a free steepness. With this one it is 1 / sqrt(1 + a x), unscaled.
    return peak / math.sqrt(1 + (1 / options.constant_lr_ratio**2 - 1) * x)


def curve(config: Config, points: int = 2000) -> list[tuple[int, float]]:
    """About `points` pairs (step, learning rate) from the schedule's start to the last step.

    The steps around every corner (end of the warmup, of the cooldown, start of the decay) are always included."""
    schedule = Schedule(config)
    span = schedule.span
    first, last = span.start, span.start + span.length - 1
    stride = max(1, -(-span.length // points))
    corners = (span.warmup, span.warmup + span.cooldown, span.length - span.decay)
    near = {first + math.floor(corner) + offset for corner in corners for offset in (-1, 0, 1)}
    steps = {*range(first, last + 1, stride), last, *(step for step in near if first <= step <= last)}
    return [(step, schedule.lr(step)) for step in sorted(steps)]
