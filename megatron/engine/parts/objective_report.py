"""Loss and reported numbers of an objective that is computed in two passes, over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from megatron.data.batch import StepBatch
from megatron.model.embedding_and_head import Head
from megatron.objectives.named import objective_of
from megatron.parallel.layers.collectives import all_reduce
from megatron.parallel.layers.label_costs import LabelsLoss

from ..arriving import Arriving
from ..part import EnginePart, Update

if TYPE_CHECKING:
    from ..base import BaseEngine


class ObjectiveReport(EnginePart):
    """Sums up the reports of all ranks' heads. Ranks of stages without a head take part."""

    def attach(self, engine: BaseEngine) -> None:
        self.mesh, self.device = engine.mesh, engine.device
        self.objective = objective_of(engine.config)
        self.names = (LabelsLoss.LOSS, *self.objective.reports)
        heads = (each for each in engine.module.modules() if isinstance(each, Head))
        self.loss = next((each.of_labels for each in heads), None)

    @torch.no_grad()
    def check_batch(self, batch: StepBatch) -> None:
        """Count the labels of kinds over which the objective takes means, over all data parallel ranks. Batches of an
        evaluation have no columns, and no such means."""
        if not set(self.objective.columns) <= batch.columns.keys():
            return
        weights = torch.ones_like(batch.labels) if batch.loss_mask is None else batch.loss_mask
        counted = self.objective.counted(weights, batch.columns)
        if counted:
            sums = torch.stack([each.sum(dtype=torch.float64) for each in counted.values()]).to(self.device)
            all_reduce(sums, self.mesh.data)
            # DeepSpeed divides the sums of a step by this factor (`BaseEngine`).
            factor = self.mesh.replicas.size * batch.tokens.shape[0]
            if self.loss is not None:
                self.loss.units = dict(zip(counted, (factor / sums.clamp(min=1.0)).float()))

    @torch.no_grad()
    def after_update(self, update: Update) -> Mapping[str, Any]:
        """Means over the labels of the step on all ranks, by weight."""
        sums = torch.zeros(len(self.names) + 1, dtype=torch.float64, device=self.device)
        if self.loss is not None and self.loss.sums is not None:
            sums[:-1], sums[-1] = self.loss.sums, update.weight
            self.loss.sums = None
        all_reduce(all_reduce(sums, self.mesh.replicas), self.mesh.pipeline)
        return {name: Arriving(each / sums[-1]) for name, each in zip(self.names, sums)}
