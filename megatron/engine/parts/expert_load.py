"""The load of the experts in a step, over all ranks. It moves the routers' corrections, and is reported."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config import Config
from megatron.config.variants import used_kinds
from megatron.model.expert_tally import LOSSES, ExpertTally
from megatron.parallel.layers.collectives import all_reduce
from megatron.parallel.layout.mesh import Mesh

from ..base import BaseEngine
from ..part import EnginePart, Update
from ..protocol import ArrivingEntry


class ExpertLoad(EnginePart):
    """Sums up the tallies of the layers with experts of all ranks."""

    def attach(self, engine: BaseEngine) -> None:
        self.use(engine.module, engine.config, engine.mesh, engine.device)

    def use(self, module: nn.Module, config: Config, mesh: Mesh, device: torch.device | str = "cpu") -> None:
        """Count in these layers.

        Args:
            config: names the layers of the whole model.
            device: of the sums, on stages without experts too.
        """
        self.mesh, self.device = mesh, device
        self.experts = {  # by the number of the layer
            number: experts for number, kind, options in used_kinds(config.model) if (experts := kind.experts(options))
        }
        self.local = {each.layer: each for each in module.modules() if isinstance(each, ExpertTally)}
        self.widest = max(self.experts.values(), default=0)

    @torch.no_grad()
    def after_update(self, update: Update) -> Mapping[str, Any]:
        """Close a step. Moves the corrections if the update was applied.

        Returns:
            One entry, `moe`: layer -> numbers of the step, on every rank. max_over_mean: 1 is even. entropy: of the
            load, over its largest possible value. dead: number of experts without a token. dropped: choices without a
            place, or of no expert, over the others. Auxiliary losses without their coefficients: means over
            micro-batches. load: share of each expert. correction: after the step.
        """
        width = self.widest + ExpertTally.EXTRA
        table = torch.zeros(len(self.experts), width + self.widest, device=self.device)
        for row, layer in zip(table, self.experts):
            if layer in self.local:
                tally = self.local[layer].tally
                row[: len(tally)] = tally
                tally.zero_()
        all_reduce(table, self.mesh.replicas)
        for row, layer in zip(table, self.experts):
            if layer in self.local:
                own = self.local[layer]
                if update.applied:
                    own.finish(row[: own.experts])
                if own.correction is not None:
                    row[width : width + own.experts] = own.correction[: own.experts]
        return ArrivingEntry("moe", all_reduce(table, self.mesh.pipeline), self._report)

    def _report(self, table: Tensor) -> dict[str, dict[str, Any]]:
        rows = zip(table.double(), self.experts.items())
        return {str(layer): self._numbers(row, count) for row, (layer, count) in rows}

    def _numbers(self, row: Tensor, count: int) -> dict[str, Any]:
        width = self.widest + ExpertTally.EXTRA
        tokens, (dropped, *losses, micro_batches) = row[:count], row[count : count + ExpertTally.EXTRA].tolist()
        total = tokens.sum().clamp(min=1)
        share = tokens / total
        entropy = -(share * share.clamp(min=1e-30).log()).sum() / max(torch.tensor(float(count)).log().item(), 1e-30)
        correction = row[width : width + count]
        found = {
            "max_over_mean": (share.max() * count).item(),
            "entropy": entropy.item(),
            "dead": int((tokens == 0).sum()),
            "dropped": dropped / total.item(),
            **{name: value / micro_batches for name, value in zip(LOSSES, losses) if value and micro_batches},
            "load": [round(value, 5) for value in share.tolist()],
        }
        return found | ({"correction": [round(value, 6) for value in correction.tolist()]} if correction.any() else {})
