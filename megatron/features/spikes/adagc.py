"""AdaGC (arXiv 2502.11034, algorithm 1): each tensor's gradient is clipped by the history of its own norm.

For the gradient g_i of tensor i, with its moving norm c_i (from infinity on):

    the first T steps:  h_i = min(limit / |g|, 1) with the norm over all tensors;  c_i = min(c_i, |h_i g_i|)
    then:               h_i = min(threshold c_i / |g_i|, 1);                       c_i = b c_i + (1 - b) |h_i g_i|

and the optimizer gets h_i g_i. A gradient of 0 has no information about a tensor's size, and does not change c_i. Else
a tensor without a gradient in one of the first steps would never get one again, by the minimum above.

A tensor is a logical tensor. A rank has a part of it (ZeRO, tensor parallelism). So the ranks of a stage add up the
squares of all tensors in one small collective per call of the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.engine.state import EngineState, Owned
from megatron.parallel.layers.collectives import all_reduce
from megatron.parallel.layout.mesh import Mesh, stage_axis

from .options import AdaGCSection


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
        told = {name: value for name, value in zip(self._names, norms.tolist(), strict=True) if value != torch.inf}
        return {"updates": self.updates, "norms": told}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`. An empty one resets the rule."""
        norms = state.get("norms", {})
        self.updates = int(state.get("updates", 0))
        values = [float(norms.get(name, torch.inf)) for name in self._names]
        self.norms = torch.tensor(values, dtype=torch.float64, device=self._device)

    def _all_names(self) -> list[str]:
        own = sorted({owned.tensor.name for owned in self._state.owned()})
        everything: list[list[str]] = [own]
        if self._world > 1:
            everything = [[] for _ in range(self._world)]
            dist.all_gather_object(everything, own)
        return sorted({name for names in everything for name in names})
