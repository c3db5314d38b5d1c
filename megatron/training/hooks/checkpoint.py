"""Saves checkpoints by the policy, the clock, or at the end of the run."""

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.checkpoint import Fragment, Meta
from megatron.checkpoint.save.policy import reason_to_save
from megatron.checkpoint.save.saver import Saved, Saver
from megatron.checkpoint.save.writer import non_finite
from megatron.config import Config
from megatron.config.sections.output import CheckpointSection, LevelSection
from megatron.report.ledger import best_interval, goodput, read_ledger
from megatron.worker.beacon import SAVE

from ..exchange import StepReport
from ..hook import Hook, HookContext
from ..trainer import Trainer
from .guard import NonFinite

# Prior for an unknown cluster: Llama 3 had 419 unexpected interruptions in 54 days on 16,384 GPUs (arXiv 2407.21783),
# which is one in 50,700 hours of a GPU.
DEVICE_HOURS = 50_700.0
FIRST = 300.0  # seconds until the first save of a run, which measures the cost
LEAST = 60.0  # seconds between two saves
RANK, HOST = "rank", "host"  # extent of a failure


class Interval:
    """Costs of a run's saves and its failures so far, and the interval with the least lost time, by Young and Daly.

    The mean time between failures is (prior + wall time so far) / (1 + failures so far). The prior is the time in which
    a cluster of that many devices has one failure.

    Args:
        config: of the run. Its ledger has the earlier starts.
        devices: number of ranks.
        kinds: failures after which the run would resume from these saves. None: all.
    """

    def __init__(self, config: Config, devices: int, kinds: Collection[str] | None = None) -> None:
        file = Path(config.run.dir) / "ledger.jsonl"
        entries = read_ledger(file) if file.exists() else []
        account = goodput(entries)
        self._prior = 3600 * DEVICE_HOURS / devices
        self._wall = account.wall
        self._failures = account.failures if kinds is None else failures(entries, kinds)
        saves = (each for each in entries if each["event"] == "checkpoint" and kinds is None)
        self._costs = [each["stall_seconds"] for each in saves if "stall_seconds" in each]

    def saved(self, stall: float) -> None:
        """Add the seconds that training stood still for a save."""
        self._costs.append(stall)

    def between(self, now: float) -> float:
        """Mean seconds between failures, `now` seconds after this start."""
        return (self._prior + self._wall + now) / (1 + self._failures)

    def seconds(self, now: float) -> float:
        """Seconds between two saves, `now` seconds after this start."""
        return max(self.least_waste(now), LEAST) if self._costs else FIRST

    def least_waste(self, now: float) -> float:
        """The same without a minimum. There must have been a save."""
        recent = self._costs[-10:]
        return best_interval(sum(recent) / len(recent), self.between(now))


def failures(entries: Iterable[Mapping[str, Any]], kinds: Collection[str]) -> int:
    """Number of failures of these kinds in a ledger. If a whole host fails, no rank is named."""
    ends = (entry for entry in entries if entry["event"] in ("restart", "given_up"))
    return sum((HOST if entry.get("rank") is None else RANK) in kinds for entry in ends)


def failures_answered(sections: Sequence[LevelSection], number: int) -> set[str]:
    """The kinds of failures after which a run resumes from level `number`: no nearer level survives them."""

    def survived(section: LevelSection) -> set[str]:
        return {RANK, HOST} if section.neighbours else {RANK}

    nearer = set[str]().union(*(survived(section) for section in sections[:number]))
    return survived(sections[number]) - nearer


AGAIN = 60.0  # seconds until a failed save is tried again


class CheckpointHook(Hook):
    """Decides when to save.

    Weights are saved at most once per step, and only if they and the numbers of their last step are finite. An update
    may diverge although its loss and gradients did not. A run that is stopped early always saves.

    Raises:
        NonFinite: on every rank, if the state is broken on any.
    """

    def __init__(
        self,
        section: CheckpointSection,
        saver: Saver,
        contents: Callable[[int], tuple[Iterable[Fragment], Meta]],
        inspect: Callable[[list[Fragment]], list[str]] = non_finite,
    ) -> None:
        self._section, self._saver, self._contents, self._inspect = section, saver, contents, inspect
        self._saved_at = 0.0
        self._saved_step: int | None = None
        self._time_is_up = False
        self._refused_at: float | None = None  # when the last save was found to have failed
        self._interval: Interval | None = None  # with checkpoint.auto, on rank 0

    @classmethod
    def of(cls, parts: HookContext) -> "CheckpointHook | None":
        if parts.saver is None or parts.contents is None:
            return None
        return cls(parts.config.checkpoint, parts.saver, parts.contents, parts.inspect)

    def on_start(self, trainer: Trainer) -> None:
        self._saved_at = trainer.clock.total
        if self._section.auto and trainer.is_main:
            self._interval = Interval(trainer.config, trainer.mesh.layout.world_size)
        if trainer.start and not trainer.moved:
            self._saved_step = trainer.start
        else:
            self._save_if_due(trainer)

    def before_step(self, trainer: Trainer, step: int) -> None:
        minutes, now = self._section.minutes, trainer.clock.total
        due = minutes is not None and now - self._saved_at >= 60 * minutes
        due = due or (self._interval is not None and now - self._saved_at >= self._interval.seconds(now))
        if trainer.is_main and (due or (self._refused_at is not None and now - self._refused_at >= AGAIN)):
            trainer.request("save")  # clocks differ, so rank 0's decides

    def on_numbers(self, trainer: Trainer, report: StepReport) -> None:
        self._time_is_up = self._time_is_up or "save" in report.requests

    def after_step(self, trainer: Trainer, step: int, report: StepReport) -> None:
        self._report(trainer, self._saver.poll())
        self._save_if_due(trainer)

    def on_drop(self, trainer: Trainer, step: int, requests: set[str]) -> None:
        self._report(trainer, self._saver.poll())
        self._save_if_due(trainer)

    def on_end(self, trainer: Trainer) -> None:
        if trainer.error is None:
            with trainer.beacon.during(SAVE):
                self._report(trainer, self._saver.wait(), ends=True)  # all of them, though `close` may raise the last
                self._report(trainer, self._saver.close())

    def _save_if_due(self, trainer: Trainer) -> None:
        if trainer.back is not None:
            return
        stopping = trainer.last and not trainer.finished
        reason = reason_to_save(
            self._section,
            trainer.completed,
            last_step=trainer.steps,
            stopping=stopping,
            seconds_since_save=math.inf if self._time_is_up else 0.0,
            time_is_up=self._time_is_up,
        )
        if reason is None and self._time_is_up and self._refused_at is not None:
            reason = "the last one could not be written"
        if reason is None or self._saved_step == trainer.completed:
            return
        trainer.settle()
        if trainer.back is not None:  # requested by the numbers of the last step
            return
        trainer.check_state()
        with trainer.aside(SAVE):
            begin = time.perf_counter()
            fragments, meta = intact_state(trainer, self._contents, self._inspect)
            stall = time.perf_counter() - begin
            stall += self._saver.save(trainer.completed, fragments, meta)
        if self._interval is not None:
            self._interval.saved(stall)
        self._refused_at = None
        self._saved_step, self._saved_at, self._time_is_up = trainer.completed, trainer.clock.total, False
        facts = {"reason": reason, "stall_seconds": stall, "spent": trainer.spent()}
        trainer.record("checkpoint", step=trainer.completed, **facts)

    def _report(self, trainer: Trainer, ended: list[Saved], ends: bool = False) -> None:
        again = "" if ends else f"\nthe run continues, and tries again within {AGAIN:.0f} s of training"
        for saved in ended:
            if saved.failure:
                trainer.record("checkpoint_failed", path=str(saved.path), problem=saved.failure)
                trainer.log(f"warning: {saved.failure}{again}")
                self._refused_at = trainer.clock.total
                continue
            trainer.record(
                "checkpoint_written",
                path=str(saved.path),
                seconds=saved.seconds,
                deleted=saved.deleted,
                uploaded=saved.uploaded,
                upload_problem=saved.upload_problem,
            )
            trainer.log(f"saved {saved.path} in {saved.seconds:.1f} s")
            if saved.upload_problem:
                trainer.log(f"it was not uploaded, and will be tried again: {saved.upload_problem}")


def intact_state(
    trainer: Trainer,
    contents: Callable[[int], tuple[Iterable[Fragment], Meta]],
    inspect: Callable[[list[Fragment]], list[str]],
) -> tuple[list[Fragment], Meta]:
    """The state to save, after inspecting it. All ranks call it.

    Raises:
        NonFinite: on every rank, if they are broken on any.
    """
    parts, meta = contents(trainer.completed)
    fragments = list(parts)
    found = inspect(fragments)
    ranks = int(trainer.exchange.sum([float(bool(found))])[0])
    if not ranks:
        return fragments, meta
    here = "; ".join(found) or "this rank's part is in order"
    before = f"update {trainer.completed - 1}" if trainer.completed else "the values that the run started from"
    raise NonFinite(
        f"the state after {trainer.completed} updates is broken on {ranks} of {trainer.mesh.layout.world_size} "
        f"rank(s) and was not saved: {here}. Earlier checkpoints are in order. Check {before}: its learning "
        "rate (optimizer.lr and its groups), and grad_norm in metrics.jsonl",
        step=max(trainer.completed - 1, 0),
    )
