"""Names ranks that are slower than the others, from the time that each takes for its own work without waiting."""

import math
import socket
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from megatron.config.arithmetic.batches import batches_of
from megatron.config.sections.output import SlowOptions
from megatron.worker.beacon import BACKWARD, DATA, EXCHANGE, FORWARD, OPTIMIZER, REDUCE

from ..exchange import StepReport
from ..hook import Hook, HookContext
from ..trainer import Trainer

# Work that all ranks of a stage share, and its phases. Forward and backward are one: a rank with brief micro-batches
# reports both as forward, and near that limit ranks may differ.
PARTS = {
    "data": (DATA,),
    "forward and backward": (FORWARD, BACKWARD),
    "reduce": (REDUCE,),
    "optimizer": (OPTIMIZER,),
    "exchange": (EXCHANGE,),
}


def parts_of(seconds: Sequence[float]) -> list[float]:
    """Seconds in each of `PARTS`, from seconds by phase."""
    return [sum(seconds[phase] for phase in phases) for phases in PARTS.values()]


@dataclass
class Slow:
    """A rank that is slow, or was."""

    rank: int
    since: int  # since, until: steps between which it was slow. `until` is None while it is.
    until: int | None
    others: float  # largest ratio to the median of the others of its pipeline stage
    past: float  # largest ratio to its own best
    part: str  # the one of `PARTS` with the largest loss


class Comparison:
    """Compares ranks window by window.

    Args:
        stages: stage of each rank. Ranks of a stage have the same work.
        factor: a rank is slow at this ratio to the median of its stage's others, or to its own best if it has no
            others.
        windows: number of consecutive windows in which it must be.
    """

    def __init__(self, stages: Sequence[int], factor: float, windows: int) -> None:
        self._factor, self._windows = factor, windows
        self._alike = [[rank for rank, own in enumerate(stages) if own == each] for each in dict.fromkeys(stages)]
        self._row = [0] * len(stages)
        self._best = [float("inf")] * len(stages)
        self._last = -1
        self.slow: dict[int, Slow] = {}
        self.ended: list[Slow] = []
        self.slowest: tuple[int, float, float] | None = None  # rank, times the others, times its best

    def window(self, first: int, last: int, seconds: Sequence[Sequence[float]]) -> tuple[list[Slow], list[Slow]]:
        """Take in a window.

        Args:
            first, last: its steps.
            seconds: for each rank, its own seconds in each of `PARTS`.

        Returns:
            ranks that have become slow, and ranks that are no longer slow.
        """
        sums = [sum(each) for each in seconds]
        usual, begun, over, ratios = self._usual(sums), [], [], []
        for rank, own in enumerate(sums):
            against, past = own / max(usual[rank], 1e-9), own / max(self._best[rank], 1e-9)
            ratios.append((against, rank, past))
            self._best[rank] = min(self._best[rank], own)
            self._row[rank] = self._row[rank] + 1 if against > self._factor else 0
            if self._row[rank] >= self._windows:
                now = self.slow.get(rank)
                if now is None:
                    since = first - (self._windows - 1) * (last + 1 - first)
                    self.slow[rank] = now = Slow(rank, max(since, 0), None, 0.0, 0.0, self._part(rank, seconds))
                    begun.append(now)
                now.others, now.past = max(now.others, against), max(now.past, past)
            elif rank in self.slow and not self._row[rank]:
                ended = self.slow.pop(rank)
                ended.until = first
                over.append(ended)
        self.ended += over
        slowest = max((each for each in ratios if each[0] != float("inf")), default=None)
        self.slowest = None if slowest is None else (slowest[1], slowest[0], slowest[2])
        return begun, over

    def _usual(self, sums: Sequence[float]) -> list[float]:
        usual = list(self._best)
        for ranks in self._alike:
            order = sorted(ranks, key=sums.__getitem__) if len(ranks) > 1 else []
            ordered = [sums[rank] for rank in order]
            for place, rank in enumerate(order):
                usual[rank] = median_of_others(ordered, place)
        return usual

    def _part(self, rank: int, seconds: Sequence[Sequence[float]]) -> str:
        ranks = next(ranks for ranks in self._alike if rank in ranks)
        others = [seconds[each] for each in ranks if each != rank]
        lost = [own - median(each[index] for each in others) if others else own
                for index, own in enumerate(seconds[rank])]  # fmt: skip
        return tuple(PARTS)[lost.index(max(lost))]


def median_of_others(ordered: Sequence[float], place: int) -> float:
    """The median of sorted values without the one at this place. Sorting once suffices for thousands of ranks."""
    rest = len(ordered) - 1
    low, high = (rest - 1) // 2, rest // 2
    return (ordered[low + (low >= place)] + ordered[high + (high >= place)]) / 2


class SlowRanksHook(Hook):
    """Takes each rank's own time in the phases of a step over windows of n steps, and compares the ranks of a stage.

    A rank's own time excludes waiting in collectives. On an accelerator these are times of the host. The times of a
    window travel with the numbers of the following step, so that no rank waits for them."""

    def __init__(self, options: SlowOptions, hosts: Sequence[str]) -> None:
        self._options, self._hosts, self._every = options, list(hosts), options.every or sys.maxsize
        self._first, self._before = 0, [0.0] * len(PARTS)
        self._windows = deque[range]()  # steps of the windows that are on their way
        self._comparison: Comparison | None = None
        self._record: dict[str, float | str] = {}

    @classmethod
    def of(cls, parts: HookContext) -> "SlowRanksHook | None":
        options, world = parts.config.watch.slow, parts.world
        if options.every is None or world is None or world.mesh.layout.world_size == 1:
            return None
        return cls(options, world.communicator.gather(socket.gethostname()))

    def on_start(self, trainer: Trainer) -> None:
        layout = trainer.mesh.layout
        stages = [layout.coordinates(rank).pipeline for rank in range(layout.world_size)]
        self._comparison = Comparison(stages, self._options.factor, self._options.windows)

    def before_step(self, trainer: Trainer, step: int) -> None:
        if step <= trainer.start + 2:  # the first steps compile and warm up
            self._first, self._before = step, parts_of(trainer.beacon.own)
        elif not step % self._every:
            trainer.share(self._window(trainer, step))
        if self._record:
            trainer.extra_metrics["ranks"] = self._record

    def on_numbers(self, trainer: Trainer, report: StepReport) -> None:
        if report.shared is not None:
            self._compare(trainer, report.shared.tolist())

    def after_step(self, trainer: Trainer, step: int, report: StepReport) -> None:
        """After the last step there is no further message that a window could travel with."""
        if not trainer.last or (step + 1) % self._every or step < self._first:
            return
        trainer.settle()
        own, ranks = self._window(trainer, step + 1), len(self._hosts)
        places = [own if rank == trainer.mesh.rank else [0.0] * len(own) for rank in range(ranks)]
        everyone = trainer.exchange.sum([part for place in places for part in place])
        self._compare(trainer, everyone.view(ranks, -1).tolist())

    def _window(self, trainer: Trainer, end: int) -> list[float]:
        """This rank's own seconds per step, averaged over the window that ends before a step. A smaller batch counts
        as part of a step: else a rank would be slow against its own best as soon as batches grow."""
        own, batches = parts_of(trainer.beacon.own), batches_of(trainer.config)
        steps = (batches.before(end) - batches.before(self._first)) / batches.sizes[-1]
        seconds = [(now - before) / steps for now, before in zip(own, self._before)]
        self._windows.append(range(self._first, end))
        self._first, self._before = end, own
        return seconds

    def _compare(self, trainer: Trainer, seconds: list[list[float]]) -> None:
        window = self._windows.popleft()
        if self._comparison is not None:
            begun, over = self._comparison.window(window.start, window.stop - 1, seconds)
            self._tell(trainer, self._comparison, begun, over)

    def _tell(self, trainer: Trainer, comparison: Comparison, begun: list[Slow], over: list[Slow]) -> None:
        for slow in begun:
            trainer.log(f"slow: {self._text(slow)}")
            trainer.record("slow", step=trainer.at, rank=slow.rank, host=self._hosts[slow.rank], since=slow.since,
                         times_others=slow.others, times_past=slow.past, phase=slow.part)  # fmt: skip
        for slow in over:
            trainer.log(f"rank {slow.rank} on {self._hosts[slow.rank]} is no longer slow, since step {slow.until}")
        if comparison.slowest is not None:
            rank, others, past = comparison.slowest
            self._record = {"slowest": rank, "host": self._hosts[rank], "times_others": others}
            if math.isfinite(past):
                self._record["times_past"] = past
            if rank in comparison.slow:
                self._record["since"] = comparison.slow[rank].since

    def on_end(self, trainer: Trainer) -> None:
        if self._comparison is None:
            return
        found = [*self._comparison.ended, *self._comparison.slow.values()]
        for slow in sorted(found, key=lambda each: each.since):
            trainer.log(f"slow: {self._text(slow)}")

    def _text(self, slow: Slow) -> str:
        when = f"since step {slow.since}" if slow.until is None else f"from step {slow.since} to {slow.until}"
        return (
            f"rank {slow.rank} on {self._hosts[slow.rank]} takes {slow.others:.1f} times as long as the median of the "
            f"others and {slow.past:.1f} times its own best, {when}, most of it in {slow.part}"
        )
