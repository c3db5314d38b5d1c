"""Ends a run early, on all ranks at the same step: signals and wall time."""

from __future__ import annotations

import threading

from megatron.checkpoint.save.policy import STOP_SIGNALS, StopSignals

from ..exchange import StepReport
from ..hook import Hook, HookContext
from ..trainer import Trainer

SIGNALS = tuple(number.name for number in STOP_SIGNALS)


class StopHook(Hook):
    """A signal on any rank, or rank 0's clock, ends the run after the step in which all ranks have received it.

    The checkpoint hook, which comes later in the list, then saves. A second signal has its default effect.
    """

    def __init__(self, parts: HookContext) -> None:
        self._minutes = parts.config.training.stop_after
        self._signals: StopSignals | None = None

    def on_start(self, trainer: Trainer) -> None:
        # Python delivers signals only to the main thread. A caller in another thread has its own way to stop.
        if threading.current_thread() is threading.main_thread():
            self._signals = StopSignals()
            self._signals.__enter__()

    def before_step(self, trainer: Trainer, step: int) -> None:
        if self._signals is not None and self._signals.received is not None:
            trainer.request(self._signals.received)
        if self._minutes is not None and trainer.is_main and trainer.clock.total >= 60 * self._minutes:
            trainer.request("wall time")

    during_step = before_step

    def on_numbers(self, trainer: Trainer, report: StepReport) -> None:
        self._stop(trainer, report.requests)

    def on_drop(self, trainer: Trainer, step: int, requests: set[str]) -> None:
        self._stop(trainer, requests)

    def _stop(self, trainer: Trainer, requests: set[str]) -> None:
        for name in SIGNALS:
            if name in requests:
                trainer.stop(f"signal {name}")
        if "wall time" in requests:
            trainer.stop(f"training.stop_after: {self._minutes:g} minutes")

    def on_end(self, trainer: Trainer) -> None:
        if self._signals is not None:
            self._signals.__exit__()
            self._signals = None
