"""The multi-step schedule of DeepSeek LLM (Bi et al. 2024, arXiv 2401.02954): the rate falls at a few steps."""

from __future__ import annotations

from typing import Any

from megatron.config.problems import UserError
from megatron.config.sections.recipe import ScheduleSection
from megatron.training.schedule import SchedulePeriods


def multi_step(n: int, peak: float, span: SchedulePeriods, options: ScheduleSection) -> float:
    """The peak at first. From each milestone on, a smaller share of it.

    `schedule.options` has `milestones`, rising shares of the schedule's length between 0 and 1. For each it has one
    of `rates`, shares of the peak. By default the rate falls to 31.6 % after 80 % of the steps, and to 10 % after 90 %,
    as in the paper. A rate is a function of the step only, so that a resumed run continues with the same rates.
    """
    milestones, rates = _options(options.options)
    passed = sum(n >= milestone * span.length for milestone in milestones)
    return peak * (1.0, *rates)[passed]


def _options(given: dict[str, Any]) -> tuple[list[float], list[float]]:
    options = {"milestones": [0.8, 0.9], "rates": [0.316, 0.1], **given}
    if unknown := sorted(map(str, options.keys() - {"milestones", "rates"})):
        raise UserError(f"schedule.options must not have {', '.join(unknown)}: use milestones, rates")
    milestones, rates = (_shares(name, options[name]) for name in ("milestones", "rates"))
    if len(milestones) != len(rates):
        raise UserError(f"schedule.options must have one rate per milestone, {len(milestones)} in all: {rates}")
    if milestones != sorted(milestones):
        raise UserError(f"schedule.options.milestones must rise, unlike {milestones}")
    return milestones, rates


def _shares(name: str, values: Any) -> list[float]:
    if isinstance(values, str) or not all(
        isinstance(each, int | float) and not isinstance(each, bool) and 0 <= each <= 1 for each in values
    ):
        raise UserError(f"schedule.options.{name} must be a list of numbers from 0 to 1, not {values!r}")
    return [float(each) for each in values]
