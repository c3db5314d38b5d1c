"""The losses of modules that predict further tokens, over all ranks, for the record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config import Config
from megatron.model.multi_token import MultiTokenPrediction
from megatron.parallel.layers.collectives import all_reduce
from megatron.parallel.layout.mesh import Mesh

from .arriving import Arriving

NAME = "multi_token_losses"


class FurtherLosses:
    """Sums up what the modules of all ranks have been trained on.

    Args:
        module: this rank's layers.
        config: says how many modules there are, to ranks of stages without them too.
    """

    def __init__(self, module: nn.Module, config: Config, mesh: Mesh, device: torch.device | str = "cpu"):
        self.mesh, self.device, self.depth = mesh, device, len(config.model.further_blocks)
        self.modules = next((each for each in module.modules() if isinstance(each, MultiTokenPrediction)), None)

    @torch.no_grad()
    def finish(self) -> Mapping[str, Any]:
        """Close a step: every rank calls it. Gives the same on all ranks; nothing without modules."""
        if not self.depth:
            return {}
        sums = torch.zeros(2, self.depth, dtype=torch.float64, device=self.device)
        if self.modules is not None:
            sums += self.modules.sums
            self.modules.sums.zero_()
        return FurtherReport(all_reduce(all_reduce(sums, self.mesh.replicas), self.mesh.pipeline))


class FurtherReport(Mapping):
    """One entry: the mean cross-entropy of each module's labels in nats, None where none counts; read from the device
    when somebody asks."""

    def __init__(self, sums: Tensor):
        self.sums = Arriving(sums)

    def __iter__(self) -> Iterator[str]:
        yield NAME

    def __len__(self) -> int:
        return 1

    def __getitem__(self, key: str) -> list[float | None]:
        if key != NAME:
            raise KeyError(key)
        losses, weights = self.sums.read().tolist()
        return [loss / weight if weight else None for loss, weight in zip(losses, weights)]
