"""Key and rule of the statistics, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.config.features.feature import Feature, Keys, logged
from megatron.config.section import Section, key

if TYPE_CHECKING:
    from megatron.config.problems import Problem
    from megatron.config.rule_context import RuleContext

KEY = "logging.statistics"


class StatisticsKeys(Section):
    statistics: int | None = key(
        None,
        "Record norms of each layer's weights, gradient, update and output, and the entropy of attention, every n "
        "steps (docs/monitoring.md).",
        unit="steps",
        gt=0,
    )


LOGGING = Keys("logging", StatisticsKeys, after="communication")


def gradients_are_clipped_by_one_factor(context: RuleContext) -> Iterator[Problem]:
    if context.value(KEY) is not None and context.option("spikes.action") == "adagc":
        yield context.problem(
            KEY,
            "spikes.action",
            rule="must be off with adagc: the norms of gradients before clipping do not follow from those after it",
            fix="remove logging.statistics",
        )


FEATURE = Feature(
    about="Norms by layer.",
    wanted=lambda config: LOGGING.of(config).statistics is not None,
    keys=(LOGGING,),
    rules=(logged(KEY), gradients_are_clipped_by_one_factor),
    hook="megatron.features.statistics.hook:StatisticsHook",
    hook_before=("lengths", "log"),
)
