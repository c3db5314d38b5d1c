"""When to save: functions of the step and of time, with equal answers on all ranks."""

import signal
from collections.abc import Iterable
from typing import Any

from ...config.sections.output import CheckpointSection

LOG_SPACED = frozenset([0, *(2**power for power in range(10))])  # 0, 1, 2, 4, ..., 512


def reason_to_save(
    section: CheckpointSection,
    step: int,
    *,
    last_step: int | None = None,
    seconds_since_save: float = 0.0,
    stopping: bool = False,
    time_is_up: bool = False,
) -> str | None:
    """Reason to save after `step` optimizer steps (0: before the first), or None.

    Args:
        last_step: the run's last step.
        seconds_since_save: since the last save or the start. Clocks differ, so all ranks pass rank 0's value.
        stopping: the run must stop (a signal, a wall-time limit). All ranks pass the same value.
        time_is_up: with `auto`, whether the interval has passed. All ranks pass rank 0's value.
    """
    if stopping:
        return "the run was asked to stop"
    if section.at_end and last_step is not None and step == last_step:
        return "the last step"
    if section.every and step and step % section.every == 0:
        return f"every {section.every} steps"
    if section.store_every and step and step % section.store_every == 0:
        return f"every {section.store_every} steps, for the store"
    if step in section.steps:
        return "in checkpoint.steps"
    if section.log_spaced and step in LOG_SPACED:
        return "log-spaced"
    if section.minutes is not None and seconds_since_save >= 60 * section.minutes:
        return f"every {section.minutes:g} minutes"
    if section.auto and time_is_up:
        return "the interval that loses least time"
    return None


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class StopSignals:
    """Remembers that a signal asked the run to stop. The loop asks once per step. A second signal acts as usual.

    A signal that was ignored when the process started stays ignored: under `nohup` a lost terminal stops no run. Use it
    as a context in the main thread, which restores the handlers at its end.

    Attributes:
        received: name of the signal, or None.
    """

    def __init__(self, signals: Iterable[signal.Signals] = STOP_SIGNALS) -> None:
        self.received: str | None = None
        self._signals = tuple(number for number in signals if signal.getsignal(number) != signal.SIG_IGN)
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        self._previous = {number: signal.signal(number, self._remember) for number in self._signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _frame: object) -> None:
        self.received = signal.Signals(number).name
        signal.signal(number, self._previous[signal.Signals(number)] or signal.SIG_DFL)
