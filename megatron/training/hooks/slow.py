"""Names ranks that are slower than the others, while the run goes on and at its end."""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence

from megatron.config.sections.watch import SlowOptions

from ..exchange import StepReport
from ..hook import Hook, HookContext
from ..slow import PARTS, Comparison, Slow, parts_of
from ..trainer import Trainer

AT_ONCE = 2  # windows that are exchanged together: the message takes longer than all that is done with it


class SlowRanksHook(Hook):
    """Takes each rank's own time in the phases of a step over windows of n steps, and compares the ranks of a stage.

    A rank's own time leaves out what it waits in collectives. On an accelerator these are the times of the host.

    Args:
        options: `watch.slow`.
        hosts: of each rank.
    """

    def __init__(self, options: SlowOptions, hosts: Sequence[str]) -> None:
        self._options, self._hosts = options, list(hosts)
        self._first, self._before = 0, [0.0] * len(PARTS)
        self._kept: list[tuple[int, int, list[float]]] = []  # first step, last step and own seconds of a window
        self._comparison: Comparison | None = None
        self._record: dict[str, float] = {}

    @classmethod
    def of(cls, parts: HookContext) -> SlowRanksHook | None:
        options, world = parts.config.watch.slow, parts.world
        if options.every is None or world is None or world.mesh.layout.world_size == 1:
            return None
        return cls(options, world.communicator.gather(socket.gethostname()))

    def on_start(self, trainer: Trainer) -> None:
        layout = trainer.mesh.layout
        stages = [layout.coordinates(rank).pipeline for rank in range(layout.world_size)]
        self._comparison = Comparison(stages, self._options.factor, self._options.windows)

    def before_step(self, trainer: Trainer, step: int) -> None:
        if step < trainer.start + 2:  # the first steps compile and warm up
            self._first, self._before = step + 1, self._own(trainer)
        if self._record:
            trainer.extra_metrics["ranks"] = self._record

    def after_step(self, trainer: Trainer, step: int, report: StepReport) -> None:
        comparison, every = self._comparison, self._options.every
        if comparison is None or every is None:
            return
        if not (step + 1) % every and step >= self._first:
            own, steps = self._own(trainer), step + 1 - self._first
            self._kept.append((self._first, step, [(now - before) / steps for now, before in zip(own, self._before)]))
            self._first, self._before = step + 1, own
        if len(self._kept) == AT_ONCE or (self._kept and trainer.last):  # behind the last step, no rank need come
            self._exchange(trainer, comparison)

    def _exchange(self, trainer: Trainer, comparison: Comparison) -> None:
        """Each rank adds its seconds in its own place: the message is of the kind that every step ends with."""
        kept, self._kept = self._kept, []
        own = [part for *_, seconds in kept for part in seconds]
        before, size = trainer.mesh.rank * len(own), len(self._hosts) * len(own)
        everyone = trainer.exchange.sum([0.0] * before + own + [0.0] * (size - before - len(own))).tolist()
        for number, (first, last, _) in enumerate(kept):
            places = range(number * len(PARTS), size, len(own))
            seconds = [everyone[place : place + len(PARTS)] for place in places]
            self._tell(trainer, comparison, *comparison.window(first, last, seconds))

    def _tell(self, trainer: Trainer, comparison: Comparison, begun: list[Slow], over: list[Slow]) -> None:
        for slow in begun:
            trainer.log(f"slow: {self._text(slow)}")
            trainer.record("slow", step=trainer.at, rank=slow.rank, host=self._hosts[slow.rank], since=slow.since,
                         times_others=slow.others, times_past=slow.past, phase=slow.part)  # fmt: skip
        for slow in over:
            trainer.log(f"rank {slow.rank} on {self._hosts[slow.rank]} is no longer slow, since step {slow.until}")
        if comparison.slowest is not None:
            rank, others, past = comparison.slowest
            self._record = {"slowest": rank, "times_others": others}
            if math.isfinite(past):
                self._record["times_past"] = past

    def on_end(self, trainer: Trainer) -> None:
        if self._comparison is None:
            return
        found = [*self._comparison.ended, *self._comparison.slow.values()]
        for slow in sorted(found, key=lambda each: each.since):
            trainer.log(f"slow: {self._text(slow)}")

    def _own(self, trainer: Trainer) -> list[float]:
        return parts_of(trainer.beacon.own)

    def _text(self, slow: Slow) -> str:
        when = f"since step {slow.since}" if slow.until is None else f"from step {slow.since} to {slow.until}"
        return (
            f"rank {slow.rank} on {self._hosts[slow.rank]} takes {slow.others:.1f} times as long as the median of the "
            f"others and {slow.past:.1f} times its own best, {when}, most of it in {slow.part}"
        )
