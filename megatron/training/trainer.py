"""The training loop. Everything outside the steps is in hooks, called at the lines shown here."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron.config import Config
from megatron.data.batch import StepBatch
from megatron.data.loader import Loader
from megatron.engine.protocol import Engine, StepDropped
from megatron.parallel.layout.mesh import Mesh
from megatron.parallel.messages.account import phase
from megatron.report.ledger import Ledger
from megatron.report.sinks import Sinks
from megatron.worker.beacon import END, EXCHANGE, HOOKS, SETUP, Beacon

from .exchange import REQUESTS, STOPS, Exchange, Meeting, Number, StepReport
from .hook import Hook, RollBack, RunStep
from .schedule import Schedule
from .world import WallTime

EVERY = 5.0  # least seconds between two exchanges
SHARE_OF_GRACE = 0.25  # of the time between signal and kill, to finish a step. The rest is for saving


class Looks:
    """Called by the engine between the micro-batches of one step, at the same ones on all ranks.

    A signal must not wait for 32 micro-batches on a CPU until the user loses patience. So all ranks ask each other
    whether one of them has to stop, at most every few seconds. Faster steps are not interrupted and cost nothing. The
    frequency is the same on all ranks: it follows from the exchanged time of the step before.

    Args:
        pace: seconds of a step, equal on all ranks. None if unknown.
    """

    def __init__(self, trainer: "Trainer", step: int, pace: float | None) -> None:
        self._trainer, self._step, self._pace = trainer, step, pace
        self._begin = time.monotonic()
        self._finishing = False

    def __call__(self, done: int, total: int) -> None:
        """`done` of `total` equal parts of the step's work are over.

        Raises:
            StepDropped: on all ranks, if one of them has to stop and the work done is less than the rest, or the
                rest takes too long.
        """
        looks = total - 1 if self._pace is None else min(total - 1, int(self._pace / EVERY))
        parts = looks + 1
        if self._finishing or parts * done // total == parts * (done - 1) // total:
            return
        self._trainer.ask(self._step)
        requests, elapsed = self._trainer.exchange.look(self._trainer.requests, time.monotonic() - self._begin)
        if not requests & set(STOPS):
            return
        left = elapsed * (total - done) / done
        if left <= elapsed and left <= SHARE_OF_GRACE * self._trainer.config.launch.grace:
            self._finishing = True
            return
        raise StepDropped(requests, done / total, left)


class Clock:
    """Measures laps of steps. It never waits for a device: a lap is read just after the step's numbers."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._started = self._lap = now()
        self._paused = 0.0
        self._data = 0.0

    @property
    def total(self) -> float:
        """Seconds since the clock was made, pauses included."""
        return self._now() - self._started

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time inside does not count in the lap."""
        begin = self._now()
        try:
            yield
        finally:
            self._paused += self._now() - begin

    @contextmanager
    def data(self) -> Iterator[None]:
        """Time inside is waiting for data. It counts in the lap and is also returned separately."""
        begin = self._now()
        try:
            yield
        finally:
            self._data += self._now() - begin

    def lap(self) -> tuple[float, float]:
        """Seconds of training since the last lap, and the part of them spent waiting for data."""
        now = self._now()
        seconds, data = now - self._lap - self._paused, self._data
        self._lap, self._paused, self._data = now, 0.0, 0.0
        return seconds, data


@dataclass(frozen=True)
class Outcome:
    """End of a run: completed updates, reason, whether all of `training.steps` are done, and a requested rollback."""

    step: int
    reason: str
    finished: bool
    back: RollBack | None = None


class Trainer:
    """Runs an engine over the steps of a resolved `Config`.

    Args:
        loader: `loader.step(n)` gives this rank's `StepBatch` of update n.
        hooks: called in this order at each hook point.
        sinks: receive metrics and messages (silent on ranks above 0).
        tokens: number of tokens read after a number of updates.
        ledger: the run's ledger on rank 0, None elsewhere.
        start: completed updates of the resumed checkpoint.
        device: of the engine's numbers.
        beacon: reports this rank's phase.
        wall_time: the account of this start's time.
    """

    def __init__(
        self,
        config: Config,
        *,
        engine: Engine,
        loader: Loader,
        mesh: Mesh,
        hooks: Sequence[Hook],
        sinks: Sinks,
        tokens: Callable[[int], int],
        ledger: Ledger | None = None,
        start: int = 0,
        device: torch.device | str = "cpu",
        beacon: Beacon | None = None,
        wall_time: WallTime | None = None,
    ) -> None:
        self.beacon = beacon or Beacon()
        self.wall_time = wall_time or WallTime(self.beacon)
        self.config, self.engine, self.loader, self.mesh = config, engine, loader, mesh
        self.hooks, self.sinks, self.ledger = list(hooks), sinks, ledger
        self.schedule, self.exchange, self.clock = Schedule(config), Exchange(mesh, device), Clock()
        self.steps = config.training.steps
        self.start, self.end = start, min(self.steps, config.training.stop_at_step or self.steps)
        self.completed = self.at = start  # updates done, and number of the current update in messages and metrics
        self.tokens = tokens
        self._run_step: RunStep = lambda batch, lr, look: self.engine.step(batch, lr, look)
        for hook in self.hooks:
            if "run_step" in hook.points:
                self._run_step = partial(hook.run_step, self, self._run_step)
        self.extra_metrics: dict[str, Any] = {}  # what hooks add to the record of this step, if it is written
        self.stop_reason: str | None = None
        self.open = False  # after the last step: a hook has not ended its work. The next start does
        self.moved = False  # at the start: a hook has changed the state, after the last step
        self.error: BaseException | None = None
        self.back: RollBack | None = None
        self._requests: set[str] = set()
        self._told: set[str] = set()  # requests that were exchanged in the current step
        self.batch: StepBatch  # of the current or last step
        self._begun = self._met_at = self._after = 0.0  # of the current step. `_after`: seconds from exchange to end
        self._met: Meeting | None = None
        self._share: list[float] = []
        self._unread: StepReport | None = None
        self._pace: float | None = None  # seconds of the last step whose numbers were read, the same on all ranks

    def run(self) -> Outcome:
        """Train until the last step or an earlier stop. All ranks call it.

        Raises:
            whatever the engine, the loader or a hook raises, after it is in the ledger and the hooks have ended.
        """
        try:
            self.beacon.at(SETUP)
            self._call("on_start")
            while self.completed < self.end:  # a hook may skip steps
                step = self.at = self.completed
                self.beacon.begin(step)
                with self.clock.data():
                    batch = self.loader.step(step)
                self.extra_metrics.clear()
                self.beacon.at(HOOKS)
                self._call("before_step", step)
                try:
                    report = self._step(step, batch)
                except StepDropped as dropped:
                    self.settle()  # a run that has to go back saves nothing
                    self._drop(step, dropped)
                    self.back = None  # the next start does: this engine makes no other step
                    break
                self.beacon.at(HOOKS)
                self._call("after_step", step, report)
                self.beacon.done()
                if self.stop_reason or self.back:
                    break
            self.settle()
        except BaseException as error:
            self.error = error
            step = getattr(error, "step", self.at)  # an error found later knows its step
            self.record(
                "error",
                step=step,
                completed=self.completed,
                error=f"{type(error).__name__}: {error}",
                spent=self.spent(),
            )
            raise
        finally:
            self.beacon.at(END)
            self._call("on_end", reverse=True)
        return self._outcome()

    def _step(self, step: int, batch: StepBatch) -> StepReport:
        lr = self.schedule.lr(step)
        self.batch, self._begun, self._met = batch, time.monotonic(), None
        result = self._run_step(batch, lr, Looks(self, step, self._pace))
        if self.exchange.device.type != "cpu" and self.mesh.data.size > 1 and batch.loss_mask is not None:
            # Before this step's numbers are on their way: when those are read, the weight has arrived as well.
            later = self.loader.ahead(step + 2)
            if later is not None:
                self.engine.foresee(later)
        if self._met is None:
            self.beacon.at(EXCHANGE)
            self.meet(result.loss, result.tokens)
        met = self._met
        assert met is not None  # made in the optimizer's phase or before, or just now
        report = StepReport(step, lr, result, met.sums(), met.shared(self.mesh.layout.world_size))
        self._after = time.monotonic() - self._met_at
        self._requests -= self._told
        self.completed = step + 1
        # On an accelerator a step's numbers are read while the next step runs, so that the device never waits.
        earlier, self._unread = self._unread, report
        if earlier is not None:
            self._hear(earlier)
        if self.exchange.device.type == "cpu":
            self.settle()
        return report

    @phase("exchange")
    def meet(self, loss: Number, tokens: Number, *norm: Number, early: bool = False) -> Meeting:
        """Exchange the numbers of the step once: before the update if that depends on them, else after it."""
        self._told, self._met_at = set(self._requests), time.monotonic()
        seconds = self._met_at - self._begun  # the rest takes as long as in the step before
        seconds += self._after if norm or early else 0.0
        share, self._share = self._share, []
        self._met = self.exchange.meet(
            loss, tokens, self.batch.hash, self._told, seconds, *norm, share=share, early=early
        )
        return self._met

    def _drop(self, step: int, dropped: StepDropped) -> None:
        left = f"the rest would have taken {dropped.left:.0f} s"
        self.log(f"step {step} dropped after {dropped.done:.0%} of its work: {left}. Nothing else is lost")
        self.record("dropped", step=step, done=dropped.done, seconds_left=dropped.left)
        self._call("on_drop", step, dropped.requests)
        self.stop("stop requested within a step")

    def settle(self) -> None:
        """Read the numbers of the last step now. All ranks call it at the same step."""
        report, self._unread = self._unread, None
        if report is not None:
            self._hear(report)

    def unread(self, report: StepReport) -> bool:
        """Whether the numbers of a step have not been read yet."""
        return self._unread is report

    def _hear(self, report: StepReport) -> None:
        self._pace = report.seconds
        self._call("on_numbers", report)

    def check_state(self) -> None:
        """Have the hooks check the state before it is saved. All ranks call it at the same step."""
        self._call("before_save")

    def ask(self, step: int) -> None:
        """Have the hooks make their requests within a step. See `requests`."""
        self._call("during_step", step)

    @property
    def requests(self) -> set[str]:
        """Requests of this rank that were not exchanged yet."""
        return set(self._requests)

    def request(self, request: str) -> None:
        """Send a request to all ranks, with the numbers of a step."""
        if request not in REQUESTS:
            raise ValueError(f"unknown request {request!r}: must be one of {', '.join(REQUESTS)}")
        self._requests.add(request)

    def share(self, numbers: Sequence[float]) -> None:
        """Send numbers of this rank to all ranks, with the numbers of the step that begins (`StepReport.shared`).
        All ranks call it before the same step, at most once, with the same number of numbers."""
        self._share = list(numbers)

    def stop(self, reason: str) -> None:
        """End the run after the current step. All ranks call it at the same step."""
        self.stop_reason = self.stop_reason or reason

    def go_back(self, back: RollBack) -> None:
        """End after the current step, to resume from an earlier checkpoint. All ranks call it at the same step."""
        self.back = self.back or back

    @contextmanager
    def aside(self, phase: int, detail: str = "") -> Iterator[None]:
        """Time inside is not part of a step: the clock stands, and the beacon reports another phase."""
        with self.clock.pause(), self.beacon.during(phase, detail.encode()):
            yield

    @property
    def last(self) -> bool:
        """Whether no step comes after the completed ones."""
        return self.completed >= self.end or self.stop_reason is not None

    @property
    def finished(self) -> bool:
        """Whether the run is over."""
        return self.completed >= self.steps and not self.open

    @property
    def is_main(self) -> bool:
        return self.mesh.rank == 0

    def log(self, text: str) -> None:
        """A message to the user. Only rank 0's is shown."""
        if self.is_main:
            self.sinks.log(text)

    def record(self, event: str, **facts: Any) -> None:
        if self.ledger is not None:
            self.ledger.write(event, **facts)

    def spent(self) -> dict[str, Any]:
        """Where the time of this start went, for an entry of the ledger."""
        return self.wall_time.spent(self.completed)

    def _call(self, point: str, *arguments: Any, reverse: bool = False) -> None:
        for hook in reversed(self.hooks) if reverse else self.hooks:
            if point in hook.points:
                getattr(hook, point)(self, *arguments)

    def _outcome(self) -> Outcome:
        if self.back is not None:
            if self.stop_reason is not None:  # nothing was saved: the next start meets the same numbers
                return Outcome(self.completed, self.stop_reason, False)
            return Outcome(self.completed, self.back.reason, False, self.back)
        if self.finished:
            return Outcome(self.completed, "finished", True)
        reason = self.stop_reason or f"training.stop_at_step: {self.config.training.stop_at_step}"
        return Outcome(self.completed, reason, False)
