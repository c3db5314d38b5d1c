"""Whether a step's loss or gradient norm is a spike, from those before it: numbers in, a decision out.

The mean and the standard deviation are those of the last `window` values, without the one that is judged and without
values that are no numbers, as OLMo-core does it (`SkipStepOptimizer`); nothing is judged before half a window of them
is there. ZClip (arXiv 2504.02507) has moving averages of its own, of the norms after clipping.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from megatron.engine.spike import CLIP, LOSS, NORM, Spike

from .options import ADAGC, SpikeClipSection, SpikesSection

_UNIT, _LARGEST = 2.0**-200, 2.0**300  # every fp32 number is so many units; squares of the largest are still floats


class RunningWindow:
    """The last values of a number. To judge one takes no longer for a long window: their sum and that of their squares
    are kept, as whole numbers of `_UNIT`. Those are exact, so that nothing drifts as values come and go, and a run that
    was resumed has the same as one that never ended.
    """

    def __init__(self, length: int, sigma: float) -> None:
        self._length, self._least, self._sigma = length, max(2, length // 2), sigma
        self._units = deque[int]()
        self._sum = self._squares = 0

    @property
    def values(self) -> list[float]:
        """The oldest first."""
        return [units * _UNIT for units in self._units]

    def exceeded(self, value: float) -> float | None:
        """The largest value that is no spike, if this one is above it; None where it is not, or too few are there."""
        count = len(self._units)
        if count < self._least:
            return None
        mean = self._sum / count * _UNIT
        if value <= mean:  # as half of them are: no deviation is needed
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

    With mean m and deviation s of the norms so far and z = (g - m) / s, a norm g with z > z0 is clipped to
    m + z0 s z0 / z; then m' = d m + (1 - d) g and s'^2 = d s^2 + (1 - d) (g - m')^2 with g after clipping.
    """

    def __init__(self, options: SpikeClipSection) -> None:
        self._options = options
        self.first: list[float] = []  # norms of the warmup
        self.mean = self.variance = 0.0

    def bound(self, norm: float) -> float:
        """What the norm is clipped to: itself where it is no spike."""
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
    """Judges one step after another; its state is that of the run."""

    def __init__(self, options: SpikesSection) -> None:
        self._options = options
        self.windows = self._new_windows()
        self.clip = ZClip(options.clip)
        self.acted: list[int] = []  # steps whose update was left out, as far back as `within` reaches

    def _new_windows(self) -> dict[str, RunningWindow]:
        return {name: RunningWindow(self._options.window, self._options.sigma) for name in (LOSS, NORM)}

    def judge(self, loss: float, norm: float | None) -> tuple[Spike | None, float | None]:
        """What a step is, and what its gradient norm is to be clipped to (None: not by this rule)."""
        options = self._options
        for name, value in ((LOSS, loss), (NORM, norm)):
            if value is not None and not math.isfinite(value):
                return Spike(name, value, None, options.non_finite), None
        if options.action == CLIP:
            assert norm is not None
            bound = self.clip.bound(norm)
            return (Spike(NORM, norm, bound, CLIP), bound) if bound < norm else (None, None)
        if options.action == ADAGC:  # which has no spikes, but a bound for each tensor
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
        """JSON values."""
        return {
            LOSS: self.windows[LOSS].values,
            NORM: self.windows[NORM].values,
            "acted": list(self.acted),
            CLIP: {"first": list(self.clip.first), "mean": self.clip.mean, "variance": self.clip.variance},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """From `state`; nothing of it leaves the rule new. A window that has become shorter keeps the newest."""
        self.windows = self._new_windows()
        for name, window in self.windows.items():
            for value in state.get(name, ()):
                window.add(float(value))
        self.acted = list(map(int, state.get("acted", ())))
        clip = state.get(CLIP, {})
        self.clip = ZClip(self._options.clip)
        self.clip.first = list(map(float, clip.get("first", ())))
        self.clip.mean, self.clip.variance = float(clip.get("mean", 0.0)), float(clip.get("variance", 0.0))
