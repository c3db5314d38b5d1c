"""Decides whether a step's loss or gradient norm is a spike, from those before it.

Mean and standard deviation are taken over the last `window` values, without the judged one and without non-finite
values, as in OLMo-core (`SkipStepOptimizer`). Nothing is judged before half a window is full. ZClip (arXiv 2504.02507)
has its own moving averages, of the norms after clipping.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from megatron.engine.spike import CLIP, LOSS, NORM, Spike

from .options import ADAGC, SpikeClipSection, SpikesSection

_UNIT, _LARGEST = 2.0**-200, 2.0**300  # every fp32 number is a multiple of _UNIT. Squares of _LARGEST are floats


class RunningWindow:
    """The last values of a number. Judging one takes the same time for any length: the sums of values and of squares
    are kept, as whole multiples of `_UNIT`. These are exact, so nothing drifts, and a resumed run has the same sums
    as one that never ended."""

    def __init__(self, length: int, sigma: float) -> None:
        self._length, self._least, self._sigma = length, max(2, length // 2), sigma
        self._units = deque[int]()
        self._sum = self._squares = 0

    @property
    def values(self) -> list[float]:
        """The oldest first."""
        return [units * _UNIT for units in self._units]

    def exceeded(self, value: float) -> float | None:
        """The limit that this value exceeds. None if it does not, or if there are too few values."""
        count = len(self._units)
        if count < self._least:
            return None
        mean = self._sum / count * _UNIT
        if value <= mean:  # half of all values: no deviation is needed
            return None
        variance = (count * self._squares - self._sum**2) / (count * (count - 1))
        limit = mean + self._sigma * math.sqrt(variance) * _UNIT
        return limit if value > limit else None

    def add(self, value: float) -> None:
        units = int(value / _UNIT) if abs(value) < _LARGEST else int(math.copysign(_LARGEST, value) / _UNIT)
        gone = self._units.popleft() if len(self._units) == self._length else 0
        self._units.append(units)
        self._sum += units - gone
        self._squares += units * units - gone * gone


class ZClip:
    """Bounds the gradient norm by its moving mean and variance.

    With mean m and deviation s of the norms so far and z = (g - m) / s, a norm g with z > z0 is clipped to m + z0 s
    z0 / z. Then m' = d m + (1 - d) g and s'^2 = d s^2 + (1 - d) (g - m')^2 with g after clipping.
    """

    def __init__(self, options: SpikeClipSection) -> None:
        self._options = options
        self.first: list[float] = []  # norms of the warmup
        self.mean = self.variance = 0.0

    def bound(self, norm: float) -> float:
        """The bound of the norm: the norm itself if it is no spike."""
        options = self._options
        if len(self.first) < options.warmup:
            self.first.append(norm)
            if len(self.first) == options.warmup:
                self.mean = math.fsum(self.first) / options.warmup
                self.variance = statistics.pvariance(self.first, self.mean)
            return norm
        deviation = math.sqrt(self.variance)
        z = (norm - self.mean) / (deviation + 1e-6)
        bound = self.mean + options.z * deviation * options.z / z if z > options.z else norm
        self.mean = options.decay * self.mean + (1 - options.decay) * bound
        self.variance = options.decay * self.variance + (1 - options.decay) * (bound - self.mean) ** 2
        return bound


class SpikeRule:
    """Judges one step after another. Its state is the run's."""

    def __init__(self, options: SpikesSection) -> None:
        self._options = options
        self.windows = self._new_windows()
        self.clip = ZClip(options.clip)
        self.acted: list[int] = []  # steps of skipped updates, as far back as `within` reaches

    def _new_windows(self) -> dict[str, RunningWindow]:
        return {name: RunningWindow(self._options.window, self._options.sigma) for name in (LOSS, NORM)}

    def judge(self, loss: float, norm: float | None) -> tuple[Spike | None, float | None]:
        """The spike of a step, if any, and the bound of its gradient norm (None: not bounded by this rule)."""
        options = self._options
        for name, value in ((LOSS, loss), (NORM, norm)):
            if value is not None and not math.isfinite(value):
                return Spike(name, value, None, options.non_finite), None
        if options.action == CLIP:
            assert norm is not None
            bound = self.clip.bound(norm)
            return (Spike(NORM, norm, bound, CLIP), bound) if bound < norm else (None, None)
        if options.action == ADAGC:  # has a bound for each tensor, but no spikes
            return None, None
        found = None
        for name, value in ((LOSS, loss), (NORM, norm)):
            if value is None:
                continue
            watched = options.watch == "both" or (options.watch == "loss") == (name == LOSS)
            if watched and found is None and options.action != "off":
                limit = self.windows[name].exceeded(value)
                found = None if limit is None else Spike(name, value, limit, options.action)
            self.windows[name].add(value)
        return found, None

    def state(self) -> dict[str, Any]:
        return {
            LOSS: self.windows[LOSS].values,
            NORM: self.windows[NORM].values,
            "acted": list(self.acted),
            CLIP: {"first": list(self.clip.first), "mean": self.clip.mean, "variance": self.clip.variance},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`. An empty one resets the rule. A window that has become shorter keeps the newest values."""
        self.windows = self._new_windows()
        for name, window in self.windows.items():
            for value in state.get(name, ()):
                window.add(float(value))
        self.acted = list(map(int, state.get("acted", ())))
        clip = state.get(CLIP, {})
        self.clip = ZClip(self._options.clip)
        self.clip.first = list(map(float, clip.get("first", ())))
        self.clip.mean, self.clip.variance = float(clip.get("mean", 0.0)), float(clip.get("variance", 0.0))
