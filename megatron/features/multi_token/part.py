"""Losses of the modules that predict further tokens, over all ranks, for the record."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.engine.base import BaseEngine
from megatron.engine.part import EnginePart, Update
from megatron.engine.protocol import ArrivingEntry
from megatron.model.multi_token import MultiTokenPrediction
from megatron.parallel.layers.collectives import all_reduce

NAME = "multi_token_losses"


class FurtherLosses(EnginePart):
    """Sums the losses of the modules of all ranks. Ranks of stages without modules take part."""

    def attach(self, engine: BaseEngine) -> None:
        self.mesh, self.device, self.depth = engine.mesh, engine.device, len(engine.config.model.further_blocks)
        found = (each for each in engine.module.modules() if isinstance(each, MultiTokenPrediction))
        self.modules = next(found, None)

    @torch.no_grad()
    def after_update(self, update: Update) -> Mapping[str, Any]:
        """Mean cross-entropy of each module's labels in nats, None where no label counts."""
        sums = torch.zeros(2, self.depth, dtype=torch.float64, device=self.device)
        if self.modules is not None:
            sums += self.modules.sums
            self.modules.sums.zero_()
        return ArrivingEntry(NAME, all_reduce(all_reduce(sums, self.mesh.replicas), self.mesh.pipeline), _means)


def _means(sums: Tensor) -> list[float | None]:
    return [loss / weight if weight else None for loss, weight in zip(*sums.tolist())]
