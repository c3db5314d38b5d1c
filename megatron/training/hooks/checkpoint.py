"""Saves checkpoints by the policy, the clock, or at the end of the run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from megatron.checkpoint import Fragment, Meta
from megatron.checkpoint.save.finite import non_finite
from megatron.checkpoint.save.policy import SavePolicy
from megatron.checkpoint.save.saver import Saved, Saver
from megatron.worker.beacon import SAVE

from ..exchange import StepReport
from ..hook import Hook, HookContext
from ..interval import Interval
from ..trainer import Trainer
from .guard import NonFinite

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
        policy: SavePolicy,
        saver: Saver,
        contents: Callable[[int], tuple[Iterable[Fragment], Meta]],
        inspect: Callable[[list[Fragment]], list[str]] = non_finite,
    ) -> None:
        self._policy, self._saver, self._contents, self._inspect = policy, saver, contents, inspect
        self._saved_at = 0.0
        self._saved_step: int | None = None
        self._time_is_up = False
        self._refused_at: float | None = None  # when the last save was found to have failed
        self._interval: Interval | None = None  # with checkpoint.auto, on rank 0

    @classmethod
    def of(cls, parts: HookContext) -> CheckpointHook | None:
        if parts.saver is None or parts.contents is None:
            return None
        return cls(SavePolicy.of(parts.config.checkpoint), parts.saver, parts.contents, parts.inspect)

    def on_start(self, trainer: Trainer) -> None:
        self._saved_at = trainer.clock.total
        if self._policy.auto and trainer.is_main:
            self._interval = Interval(trainer.config, trainer.mesh.layout.world_size)
        if trainer.start:
            self._saved_step = trainer.start
        else:
            self._save_if_due(trainer)

    def before_step(self, trainer: Trainer, step: int) -> None:
        minutes, now = self._policy.minutes, trainer.clock.total
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
        stopping = trainer.last and trainer.completed < trainer.steps
        reason = self._policy.due(
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
            fragments, meta = self._contents(trainer.completed)
            fragments = list(fragments)
            refuse_broken(trainer, fragments, self._inspect)
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


def refuse_broken(trainer: Trainer, fragments: list[Fragment], inspect: Callable[[list[Fragment]], list[str]]) -> None:
    """Inspect fragments before they are saved. All ranks call it.

    Raises:
        NonFinite: on every rank, if they are broken on any.
    """
    found = inspect(fragments)
    ranks = int(trainer.exchange.sum([float(bool(found))])[0])
    if not ranks:
        return
    here = "; ".join(found) or "this rank's part is in order"
    before = f"update {trainer.completed - 1}" if trainer.completed else "the values that the run started from"
    raise NonFinite(
        f"the state after {trainer.completed} updates is broken on {ranks} of {trainer.mesh.layout.world_size} "
        f"rank(s) and was not saved: {here}. Earlier checkpoints are in order. Check {before}: its learning "
        "rate (optimizer.lr and its groups), and grad_norm in metrics.jsonl",
        step=max(trainer.completed - 1, 0),
    )
