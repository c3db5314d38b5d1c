"""The time of a step on a CPU, from the counts of a rehearsal.

If the device also runs Python, the number of operations and messages determines the time of small steps. Formulas of
FLOPs and bytes explain a tenth of a step in small models. A rehearsal counts both exactly. `bench/machine.py` measures
the cost of each, by runs whose counts differ.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from megatron.config import Config
from megatron.config.arithmetic.pipelines import bubble_factor
from megatron.engine.deepspeed.options import accumulation_steps
from megatron.parallel.layout.layout import Layout
from megatron.plan.devices import Device
from megatron.plan.prediction import choice_of
from megatron.plan.shapes import Shapes

from .rank import RankCounts
from .report import messages

SENDS = ("send", "recv")


@dataclass(frozen=True)
class HostWork:
    """Work of a rank in a step.

    Attributes:
        collectives, sends: calls of collectives, and sends and receives of pairs.
    """

    operations: float  # of torch
    collectives: float
    sends: float
    gathers: float  # parameter tensors that ZeRO 3 gathers
    flops: float  # of all matrix products

    def seconds(self, device: Device, compute: str) -> float:
        """Raises ValueError if the device has no figures of its host."""
        if device.host is None:
            raise ValueError(f"{device.name}: there are no figures of the host")
        host, rate = device.host, device.peak(compute) * device.efficiency.matrix
        figures = (host.operation, host.collective, host.send, host.gather, host.step)
        return 1e-6 * sum(count * figure for count, figure in zip(self.counts, figures)) + self.flops / rate

    @property
    def counts(self) -> tuple[float, ...]:
        """Counts in the order of `HostTime`'s figures."""
        return self.operations, self.collectives, self.sends, self.gathers, 1.0


def works(config: Config, ranks: int, seen: Mapping[int, RankCounts]) -> list[HostWork]:
    """Work of a whole step for each stage: of the rehearsed rank with most, for which others of its sequence wait."""
    layout, found = Layout.of(config, ranks), dict[int, HostWork]()
    for rank, counts in seen.items():
        work, stage = _work(config, layout, rank, counts), layout.coordinates(rank).pipeline
        found[stage] = max(work, found.get(stage, work), key=lambda each: each.operations)
    return list(found.values())


def _work(config: Config, layout: Layout, rank: int, counts: RankCounts) -> HostWork:
    full = accumulation_steps(config, layout)
    operations, flops = counts.whole(full)
    sent, _ = messages(config, layout, rank, counts)
    sends = sum(number for call, number, _ in sent if call.operation in SENDS)
    return HostWork(
        operations, sum(number for _, number, _ in sent) - sends, sends, full * _gathered(config, layout), flops
    )


def _gathered(config: Config, layout: Layout) -> float:
    """Tensors that ZeRO 3 gathers for a forward and a backward pass together, in each chunk of a sequence, and 1.5
    times that with full recomputation. Small ones that stay gathered (`zero.persistent_size`) count too."""
    if config.zero.stage != 3:
        return 0.0
    shapes, choice = Shapes(config, layout.world_size), choice_of(config)
    tensors = sum(shapes.layer(place, choice).tensors for place in range(shapes.places))
    again = 1.5 if config.training.activation_checkpointing.mode == "full" else 1.0
    return tensors * again * (config.training.sequence_chunks or 1)


def whole(config: Config, ranks: int, found: Sequence[HostWork]) -> HostWork:
    """Work that determines the time of a step: that of the slowest rehearsed rank, and of a micro-batch of the other
    stages while the pipeline fills."""
    layout = Layout.of(config, ranks)
    *others, slowest = sorted(found, key=lambda work: work.operations)
    count = accumulation_steps(config, layout)
    share = (layout.pipeline - 1) * bubble_factor(config.parallel, count) / count
    filling = [share * statistics.fmean(counts) for counts in zip(*map(astuple, others or [slowest]))]
    return HostWork(*(own + more for own, more in zip(astuple(slowest), filling)))


def step_seconds(config: Config, ranks: int, found: Sequence[HostWork], device: Device) -> float:
    """Seconds of a step, by the work of the rehearsed ranks.

    Raises:
        ValueError: the device has no figures of its host.
    """
    return whole(config, ranks, found).seconds(device, config.precision.compute)
