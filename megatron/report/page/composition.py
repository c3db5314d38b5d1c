"""Sources that a run has read over its steps: computed from its data plan, without reading any text."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.data.errors import DataError
from megatron.data.plan import SamplePlan
from megatron.data.plan_builder import build_plan

from .history import RunHistory

WINDOWS = 100


@dataclass(frozen=True)
class Composition:
    """Shares of the samples by source in windows of steps, each given by its end.

    Attributes:
        parts: source -> its share in each window. The shares of a window sum to 1.
    """

    steps: list[int]
    parts: dict[str, list[float]]


def composition(run: RunHistory) -> Composition | str:
    """Composition of the data up to the run's last step, or the reason why it is unknown."""
    if run.described is None or not run.training:
        return "there is no configuration or no step"
    config = run.described.config
    if not config.data.train and not config.data.phases:
        return "the data are made up as the run needs them"
    try:
        plan = build_plan(config)
    except (DataError, OSError, ValueError) as error:
        return f"the data cannot be opened from here ({str(error).splitlines()[0]})"
    assert isinstance(plan, SamplePlan)
    last = int(run.training[-1]["step"]) + 1
    windows = min(WINDOWS, last)
    steps = [number * last // windows for number in range(1, windows + 1)]
    parts = {}
    for source in plan.sources:
        read = [plan.batches.before(step) for step in [0, *steps]]
        drawn = [plan.drawn(source.index, samples) for samples in read]
        sizes = [end - begin for begin, end in zip(read, read[1:])]
        parts[source.name] = [(end - begin) / size for begin, end, size in zip(drawn, drawn[1:], sizes)]
    return Composition(steps, parts)
