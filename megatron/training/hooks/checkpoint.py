"""Saves checkpoints when the policy, the clock or the end of the run says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Protocol

from megatron.checkpoint import Fragment, Meta
from megatron.checkpoint.policy import SavePolicy
from megatron.checkpoint.saver import Saved


class Saver(Protocol):
    """What is used of `megatron.checkpoint.saver.Saver`; all ranks call every method."""

    def save(self, step: int, fragments: Iterable[Fragment], meta: Meta) -> float: ...

    def poll(self) -> list[Saved]: ...

    def close(self) -> list[Saved]: ...


class Checkpoint:
    """Decides when to save; how is the saver's business.

    Weights are saved only after the numbers of their last step were seen to be finite, and once per step at most. A run
    that is stopped early always saves.

    Args:
        policy: when to save.
        saver: saves, now or in the background.
        contents: (completed updates) -> the fragments that this rank owns, and what else belongs to the state.
    """

    def __init__(
        self, policy: SavePolicy, saver: Saver, contents: Callable[[int], tuple[Iterable[Fragment], Meta]]
    ) -> None:
        self._policy, self._saver, self._contents = policy, saver, contents
        self._saved_at = 0.0
        self._saved_step: int | None = None
        self._time_is_up = False

    def on_start(self, trainer) -> None:
        self._saved_at = trainer.clock.total
        if trainer.start:
            self._saved_step = trainer.start
        else:
            self._save_if_due(trainer)

    def before_step(self, trainer, step: int) -> None:
        minutes = self._policy.minutes
        if minutes is not None and trainer.speaks and trainer.clock.total - self._saved_at >= 60 * minutes:
            trainer.wish("save")  # clocks differ, so rank 0's decides

    def on_numbers(self, trainer, report) -> None:
        self._time_is_up = self._time_is_up or "save" in report.wishes

    def after_step(self, trainer, step: int, report) -> None:
        self._tell(trainer, self._saver.poll())
        self._save_if_due(trainer)

    def on_end(self, trainer) -> None:
        if trainer.error is None:
            self._tell(trainer, self._saver.close())

    def _save_if_due(self, trainer) -> None:
        stopping = trainer.last and trainer.completed < trainer.steps
        reason = self._policy.due(
            trainer.completed,
            last_step=trainer.steps,
            stopping=stopping,
            seconds_since_save=math.inf if self._time_is_up else 0.0,
        )
        if reason is None or self._saved_step == trainer.completed:
            return
        trainer.settle()
        with trainer.clock.pause():
            stall = self._saver.save(trainer.completed, *self._contents(trainer.completed))
        self._saved_step, self._saved_at, self._time_is_up = trainer.completed, trainer.clock.total, False
        trainer.note("checkpoint", step=trainer.completed, reason=reason, stall_seconds=stall)

    def _tell(self, trainer, ended: list[Saved]) -> None:
        for saved in ended:
            trainer.note(
                "checkpoint_written",
                path=str(saved.path),
                seconds=saved.seconds,
                deleted=saved.deleted,
                uploaded=saved.uploaded,
                upload_problem=saved.upload_problem,
            )
            trainer.say(f"saved {saved.path} in {saved.seconds:.1f} s")
            if saved.upload_problem:
                trainer.say(f"it was not uploaded, and will be tried again: {saved.upload_problem}")
