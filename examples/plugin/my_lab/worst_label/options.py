"""Options and rules of the feature, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.config.features.feature import Feature, Keys
from megatron.config.section import Section, key

if TYPE_CHECKING:  # features are read while the schema is made, before these modules can be imported
    from megatron.config.problems import Problem
    from megatron.config.rule_context import RuleContext


class WorstLabelOptions(Section):
    enabled: bool = key(False, "Log the largest cross-entropy of a label in each step.")
    above: float = key(0.0, "Log it only where it is larger.", unit="nats", ge=0)


class WorstLabelKeys(Section):
    worst_label: WorstLabelOptions = key(WorstLabelOptions, "The largest loss of a label in each step.")


TOP = Keys("", WorstLabelKeys)


def has_use(context: RuleContext) -> Iterator[Problem]:
    options = TOP.of(context.config).worst_label
    if options.above and not options.enabled:
        yield context.warning(
            "worst_label.above",
            "worst_label.enabled",
            rule="must go with worst_label.enabled. It has no effect here",
            fix="set worst_label.enabled=true, or remove it",
        )


FEATURE = Feature(
    about="The largest loss of a label in each step.",
    wanted=lambda config: TOP.of(config).worst_label.enabled,
    keys=(TOP,),
    rules=(has_use,),
    engine="my_lab.worst_label.part:WorstLabel",
)
