"""The time of a step on a CPU, from what a rehearsal has counted.

Where a device does the work and Python itself, small steps take as long as their operations and messages are many,
whatever their size: in models of a few thousand channels and less, formulas of FLOPs and bytes know a tenth of a step.
A rehearsal counts them exactly. What each takes is measured (`bench/machine.py`), by runs whose counts differ.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from megatron.config import Config
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
    """What takes a rank's time in a step.

    Attributes:
        operations: that torch is asked for.
        collectives, sends: calls; sends and receptions of a pair.
        gathers: tensors of parameters that ZeRO 3 gathers.
        flops: of all products.
    """

    operations: float
    collectives: float
    sends: float
    gathers: float
    flops: float

    def seconds(self, device: Device, compute: str) -> float:
        """Raises ValueError if nobody has measured the device."""
        if device.host is None:
            raise ValueError(f"{device.name}: there are no figures of the host")
        host, rate = device.host, device.peak(compute) * device.efficiency.matrix
        figures = (host.operation, host.collective, host.send, host.gather, host.step)
        return 1e-6 * sum(count * figure for count, figure in zip(self.counts, figures)) + self.flops / rate

    @property
    def counts(self) -> tuple[float, ...]:
        """What each of `HostTime`'s figures is multiplied by."""
        return self.operations, self.collectives, self.sends, self.gathers, 1.0


def works(config: Config, ranks: int, seen: Mapping[int, RankCounts]) -> list[HostWork]:
    """Of a whole step of each stage: that of the rehearsed rank with most, for which others of its sequence wait."""
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
    """Tensors that ZeRO 3 gathers for a forward and a backward pass, taken as one: in each chunk of a sequence, and
    half as often again where blocks are computed twice. Small ones that stay (`zero.persistent_size`) count as well."""
    if config.zero.stage != 3:
        return 0.0
    shapes, choice = Shapes(config, layout.world_size), choice_of(config)
    tensors = sum(shapes.layer(place, choice).tensors for place in range(shapes.places))
    again = 1.5 if config.training.activation_checkpointing.mode == "full" else 1.0
    return tensors * again * (config.training.sequence_chunks or 1)


def whole(config: Config, ranks: int, found: Sequence[HostWork]) -> HostWork:
    """What takes the time of a step: the work of the slowest rehearsed rank, and of a micro-batch of the other stages,
    for which it waits until the pipeline is full."""
    layout = Layout.of(config, ranks)
    *others, slowest = sorted(found, key=lambda work: work.operations)
    share = (layout.pipeline - 1) / accumulation_steps(config, layout)
    filling = [share * statistics.fmean(counts) for counts in zip(*map(astuple, others or [slowest]))]
    return HostWork(*(own + more for own, more in zip(astuple(slowest), filling)))


def step_seconds(config: Config, ranks: int, found: Sequence[HostWork], device: Device) -> float:
    """Of a step, by the work of the rehearsed ranks.

    Raises:
        ValueError: nobody has measured what the device's host needs.
    """
    return whole(config, ranks, found).seconds(device, config.precision.compute)
