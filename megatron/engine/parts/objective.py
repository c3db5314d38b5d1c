"""Objectives that are computed in two passes: their loss and reported numbers, and the probes that they read first."""

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from megatron.data.batch import StepBatch
from megatron.data.errors import DataError
from megatron.data.loader import batch_of
from megatron.data.plan import SyntheticPlan
from megatron.data.plan_builder import build_plan
from megatron.model.embedding_and_head import Head
from megatron.objectives.named import objective_of
from megatron.parallel.layers.collectives import all_reduce
from megatron.parallel.layers.label_costs import Labels, LabelsLoss
from megatron.parallel.layout.precision import wide_type

from ..base import BaseEngine
from ..part import EnginePart, Update
from ..protocol import Arriving


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


class Probes(EnginePart):
    """Reads a probe for each sample of a batch, without gradient and dropout, in the layout's own forward pass."""

    def attach(self, engine: BaseEngine) -> None:
        self.engine, self.objective = engine, objective_of(engine.config)
        heads = (each for each in engine.module.modules() if isinstance(each, Head))
        self.loss = next((each.of_labels for each in heads), None)

    @cached_property
    def plan(self) -> SyntheticPlan:
        """Opened by the first step: an evaluation of the run's checkpoints needs no files of training.

        Raises:
            DataError: no source makes the samples.
        """
        plan = build_plan(self.engine.config)
        if not isinstance(plan, SyntheticPlan):
            fix = "use data.synthetic=rated, or a source of your own with the method probe"
            raise DataError("data.synthetic", "the objective must have a source with probes", fix)
        return plan

    def probes_of(self, batch: StepBatch) -> StepBatch:
        """The probes of a batch. A rehearsal, whose tensors have no values, has blank ones in their place."""
        numbers = batch.sample_ids.numpy()
        columns = self.objective.columns_of_probes
        samples = [self.plan.probe(int(number), columns) for number in numbers.flat]
        return batch_of(batch.step, samples, numbers, 0, True, columns)

    @torch.no_grad()
    def before_passes(self, batch: StepBatch) -> None:
        probes = self.probes_of(batch)
        readers = [partial(self._read, probes, index) for index in range(probes.accumulation)]
        found: list[dict[str, Tensor]] = self.engine.read(probes, readers)  # type: ignore[attr-defined]
        if self.loss is None:
            return
        names, data = sorted(found[0]), self.engine.mesh.data
        sums = torch.stack([torch.cat([each[name] for each in found]).sum(dtype=torch.float64) for name in names])
        means = all_reduce(sums, data) / (batch.sample_ids.numel() * data.size)
        self.loss.known = dict(zip(names, means))

    def _read(self, probes: StepBatch, index: int, head: Head, x_BSH: Tensor) -> dict[str, Tensor]:
        def own(whole: Tensor) -> Tensor:
            return whole[index].to(x_BSH.device)

        assert probes.loss_mask is not None
        weights_BS, labels_BS = own(probes.loss_mask), own(probes.labels)
        log_p_N = head.scores(x_BSH.flatten(0, 1), labels_BS.flatten())[0]  # all: the host need not wait for a count
        log_p_BS = log_p_N.view_as(labels_BS).to(wide_type(x_BSH.dtype))
        columns = {name: own(each) for name, each in probes.columns.items()}
        return dict(self.objective.of_probes(Labels(log_p_BS, weights_BS, columns, self.objective.sequences)))
