"""Key and rules of the gradient noise scale, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.config.arithmetic.wire import FEEDS_BACK
from megatron.config.features.feature import Feature, Keys, logged
from megatron.config.section import Section, key

if TYPE_CHECKING:
    from megatron.config.problems import Problem
    from megatron.config.rule_context import RuleContext

KEY = "logging.noise_scale"


class NoiseScaleKeys(Section):
    noise_scale: int | None = key(
        None,
        "Estimate the gradient noise scale every n steps, each at the cost of another forward and backward pass "
        "(docs/monitoring.md).",
        unit="steps",
        gt=0,
    )


LOGGING = Keys("logging", NoiseScaleKeys, after="statistics")


def batch_has_two_samples(context: RuleContext) -> Iterator[Problem]:
    training = context.config.training  # its batch is None where the number of ranks is unknown
    batch = min([training.global_batch_size or 2, *(stage.global_batch_size for stage in training.batch_schedule)])
    if LOGGING.of(context.config).noise_scale is not None and batch < 2:
        yield context.problem(
            "logging.noise_scale training.global_batch_size",
            rule="must have at least two samples in a batch: it compares a part of the batch with the whole",
            fix="remove it, or use a larger training.global_batch_size",
        )


def gradients_travel_whole(context: RuleContext) -> Iterator[Problem]:
    compress = "parallel.communication.compress.data"
    wire = context.value(compress)
    if wire in FEEDS_BACK and context.replicas != 1 and context.value(KEY) is not None:
        yield context.warning(
            KEY,
            compress,
            rule=f"must go with gradients that travel whole: it measures the sent gradients, here by {wire}",
            fix="measure it in a run with compress.data=none, or remove the key",
        )


FEATURE = Feature(
    about="The gradient noise scale.",
    wanted=lambda config: LOGGING.of(config).noise_scale is not None,
    keys=(LOGGING,),
    rules=(logged(KEY), batch_has_two_samples, gradients_travel_whole),
    hook="megatron.features.noise_scale.hook:NoiseScaleHook",
    hook_before=("stop",),
    needs=lambda config: ("spikes",),
)
