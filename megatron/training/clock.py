"""Time spent in training steps, without the time spent in evaluation, checkpoints and the like."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Clock:
    """Measures laps of steps. It never waits for a device: who reads a lap has just read the step's numbers from it."""

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
        """Time inside is time spent waiting for data; it counts in the lap and is also given on its own."""
        begin = self._now()
        try:
            yield
        finally:
            self._data += self._now() - begin

    def lap(self) -> tuple[float, float]:
        """Seconds of training since the last lap, and how many of them went to waiting for data."""
        now = self._now()
        seconds, data = now - self._lap - self._paused, self._data
        self._lap, self._paused, self._data = now, 0.0, 0.0
        return seconds, data
