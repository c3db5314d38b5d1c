"""The engine's part of the feature."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.engine.part import EnginePart, Update

from .options import TOP

if TYPE_CHECKING:
    from megatron.engine.base import BaseEngine


class WorstLabel(EnginePart):
    """Adds `worst_label` to the record of a step: nats, of the labels of all ranks."""

    def attach(self, engine: BaseEngine) -> None:
        self._above = TOP.of(engine.config).worst_label.above
        self._device, self._ranks = engine.device, engine.mesh.layout.world_size

    def before_step(self, step: int, micro_batches: int) -> None:
        self._worst = torch.zeros((), device=self._device)

    def after_micro_batch(self, ce_BS: Tensor, weights_BS: Tensor, *more: Tensor) -> None:
        counted = ce_BS.detach().masked_fill(weights_BS == 0, 0.0)
        self._worst = torch.maximum(self._worst, counted.max().to(self._worst.dtype))

    def after_update(self, update: Update) -> Mapping[str, Any]:
        if self._ranks > 1:
            dist.all_reduce(self._worst, op=dist.ReduceOp.MAX)
        worst = float(self._worst)
        return {"worst_label": worst} if worst > self._above else {}
