"""Decides whether a step's loss or gradient norm is a spike, from those before it.

Mean and standard deviation are taken over the last `window` values, without the judged one and without non-finite
values, as in OLMo-core (`SkipStepOptimizer`). Nothing is judged before half a window is full. ZClip (arXiv 2504.02507)
has its own moving averages, of the norms after clipping.

AdaGC (arXiv 2502.11034, algorithm 1): each tensor's gradient is clipped by the history of its own norm.

For the gradient g_i of tensor i, with its moving norm c_i (from infinity on):

    the first T steps:  h_i = min(limit / |g|, 1) with the norm over all tensors   c_i = min(c_i, |h_i g_i|)
    then:               h_i = min(threshold c_i / |g_i|, 1)                        c_i = b c_i + (1 - b) |h_i g_i|

and the optimizer gets h_i g_i. A gradient of 0 has no information about a tensor's size, and does not change c_i. Else
a tensor without a gradient in one of the first steps would never get one again, by the minimum above.

A tensor is a logical tensor. A rank has a part of it (ZeRO, tensor parallelism). So the ranks of a stage add up the
squares of all tensors in one small collective per call of the optimizer."""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.engine.protocol import CLIP, LOSS, NORM, Spike
from megatron.engine.state import EngineState, Owned
from megatron.parallel.layers.collectives import all_reduce
from megatron.parallel.layers.parameters import logical_of
from megatron.parallel.layout.mesh import Mesh, stage_axis

from .options import ADAGC, AdaGCSection, SpikeClipSection, SpikesSection

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
    z0 / z. Then m' = d m + (1 - d) g and s'^2 = d s^2 + (1 - d) (g - m')^2 with g after clipping."""

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


class AdaGC:
    """Clips the gradients that an optimizer is about to use.

    Args:
        limit: of the global norm in the first steps. 0: none.
        state: has this rank's parts of tensors.

    Attributes:
        updates: number of clipped steps.
        norms: the moving norms of all tensors of the model, float64 [tensors]. Infinite before the first, and on
            ranks without a part of the tensor.
    """

    def __init__(
        self, options: AdaGCSection, limit: float, state: EngineState, mesh: Mesh, device: torch.device
    ) -> None:
        self._options, self._limit, self._state, self._device = options, limit, state, device
        self._stage, self._world = stage_axis(mesh), mesh.layout.world_size
        self._names = self._all_names()
        self._place = {name: place for place, name in enumerate(self._names)}
        self._owned: dict[int, list[Owned]] = {}
        self.updates = 0
        self.norms = torch.full((len(self._names),), torch.inf, dtype=torch.float64, device=device)

    def begin(self) -> None:
        """A step begins. Within the optimizer's own step DeepSpeed hides the places of tensors."""
        if not self._owned:
            for owned in self._state.owned():
                self._owned.setdefault(id(owned.flat), []).append(owned)

    def finish(self, applied: bool) -> None:
        self.updates += applied

    @torch.no_grad()
    def __call__(self, optimizer: torch.optim.Optimizer, norm: float) -> None:
        """Clip the optimizer's current gradients: everything, or (ZeRO 1 to 3) one group. All ranks of a stage call
        it with the norm of the whole gradient."""
        found = [
            (self._place[owned.tensor.name], owned, flat.grad)
            for group in optimizer.param_groups
            for flat in group["params"]
            if flat.grad is not None
            for owned in self._owned.get(id(flat), ())
        ]
        sums = torch.zeros(len(self._names), dtype=torch.float64, device=self._device)
        for place, owned, grad in found:
            if not owned.replica:
                sums[place] += torch.linalg.vector_norm(owned.view(grad), dtype=torch.float64).square()
        factors = self._factors(all_reduce(sums, self._stage).sqrt(), norm)
        for place, owned, grad in found:
            owned.view(grad).mul_(factors[place])

    def _factors(self, norms: Tensor, norm: float) -> Tensor:
        """h of each tensor. Updates the moving norms of tensors with a gradient in this call."""
        options = self._options
        if self.updates < options.warmup:
            factor = min(self._limit / norm, 1.0) if self._limit > 0 and norm > 0 else 1.0
            factors = torch.full_like(norms, factor)
            after = torch.minimum(self.norms, factors * norms)
        else:
            bound = options.threshold * self.norms
            factors = torch.where(norms > bound, bound / norms, 1.0)
            clipped = factors * norms
            after = torch.where(self.norms.isinf(), clipped, options.decay * self.norms + (1 - options.decay) * clipped)
        self.norms = torch.where(norms > 0, after, self.norms)
        return factors

    def state(self) -> dict[str, Any]:
        """JSON values of all tensors, on every rank. All ranks call it."""
        norms = self.norms.clone()
        if self._world > 1:
            dist.all_reduce(norms, op=dist.ReduceOp.MIN)
        finite = {name: value for name, value in zip(self._names, norms.tolist(), strict=True) if value != torch.inf}
        return {"updates": self.updates, "norms": finite}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`. An empty one resets the rule."""
        norms = state.get("norms", {})
        self.updates = int(state.get("updates", 0))
        values = [float(norms.get(name, torch.inf)) for name in self._names]
        self.norms = torch.tensor(values, dtype=torch.float64, device=self._device)

    def _all_names(self) -> list[str]:
        own = sorted({logical_of(each).name for each in self._state.parameters})
        everything: list[list[str]] = [own]
        if self._world > 1:
            everything = [[] for _ in range(self._world)]
            dist.all_gather_object(everything, own)
        return sorted({name for names in everything for name in names})
