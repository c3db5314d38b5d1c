"""QK-clip over all ranks: after an update, rows of the masters shrink according to the step's largest logits."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.model.logit_clip import LogitClip
from megatron.parallel.layers.collectives import all_reduce
from megatron.parallel.layers.parameters import logical_of

from ..base import BaseEngine
from ..part import EnginePart, Update


class LogitClipping(EnginePart):
    """This rank's layers that clip their logits. Ranks of all stages reduce together."""

    def attach(self, engine: BaseEngine) -> None:
        found = (getattr(each, "logit_clip", None) for each in engine.module.modules())
        self.layers = [each for each in found if isinstance(each, LogitClip)]
        self.mesh, self.masters, self.device = engine.mesh, engine.state, engine.device

    @torch.no_grad()
    def after_update(self, update: Update) -> Mapping[str, Any]:
        """Close a step. Shrinks rows if the update was applied.

        Returns:
            For the record: the largest logit of all heads of the step, and the number of clipped heads.
        """
        largest = torch.full((1,), -torch.inf, device=self.device)
        if self.layers:
            largest = torch.cat([each.largest for each in self.layers])
        largest = all_reduce(largest, self.mesh.replicas, dist.ReduceOp.MAX)
        factors: list[Tensor] = []
        place = 0
        for each in self.layers:
            factors.append(each.factors(largest[place : place + len(each.largest)]))
            place += len(each.largest)
            each.largest.fill_(-torch.inf)
        top, count = largest.max().view(1), largest.new_zeros(1)
        for heads in factors:
            count += (heads < 1).sum()
        for axis in (self.mesh.tensor, self.mesh.pipeline):
            top, count = all_reduce(top, axis, dist.ReduceOp.MAX), all_reduce(count, axis)
        clipped = int(count)
        if update.applied and clipped:
            self._shrink(factors)
        return {"attention_logits": {"largest": float(top), "clipped_heads": clipped if update.applied else 0}}

    def _shrink(self, factors: list[Tensor]) -> None:
        rows = {
            logical_of(each.parameter).name: layer.rows(each, own)
            for layer, own in zip(self.layers, factors)
            for each in layer.projections
        }
        self.masters.scale_rows(rows)
        self.masters.refresh()
