"""Means over the probes of the global batch, which an objective reads before the passes of a step."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron.data.batch import StepBatch
from megatron.data.loader import batch_of
from megatron.data.plan import SyntheticPlan
from megatron.data.plan_builder import build_plan
from megatron.model.embedding_and_head import Head
from megatron.objectives.named import objective_of
from megatron.parallel.layers.collectives import all_reduce
from megatron.parallel.layers.label_costs import Labels
from megatron.parallel.layout.precision import wide_type

from ..part import EnginePart

if TYPE_CHECKING:
    from ..base import BaseEngine


class Probes(EnginePart):
    """Reads a probe for each sample of a batch, without gradient and dropout, in the layout's own forward pass."""

    def attach(self, engine: BaseEngine) -> None:
        self.engine, self.objective = engine, objective_of(engine.config)
        plan = build_plan(engine.config)
        if not isinstance(plan, SyntheticPlan):
            raise ValueError("probes need a source of samples")
        self.probe = plan.made.probe  # type: ignore[attr-defined]
        heads = (each for each in engine.module.modules() if isinstance(each, Head))
        self.loss = next((each.of_labels for each in heads), None)

    @torch.no_grad()
    def before_passes(self, batch: StepBatch) -> None:
        numbers = batch.sample_ids.numpy()
        samples = [self.probe(int(number)) for number in numbers.flat]
        probes = batch_of(batch.step, samples, numbers, 0, True, self.objective.columns_of_probes)
        readers = [partial(self._read, probes, index) for index in range(probes.accumulation)]
        found: list[dict[str, Tensor]] = self.engine.read(probes, readers)  # type: ignore[attr-defined]
        if self.loss is None:
            return
        names, data = sorted(found[0]), self.engine.mesh.data
        sums = torch.stack([torch.cat([each[name] for each in found]).sum(dtype=torch.float64) for name in names])
        means = all_reduce(sums, data) / (numbers.size * data.size)
        self.loss.known = dict(zip(names, means))

    def _read(self, probes: StepBatch, index: int, head: Head, x_BSH: Tensor) -> dict[str, Tensor]:
        def own(whole: Tensor) -> Tensor:
            return whole[index].to(x_BSH.device)

        assert probes.loss_mask is not None
        weights_BS, labels_BS = own(probes.loss_mask), own(probes.labels)
        counts_BS = weights_BS != 0
        log_p_BS = torch.zeros(labels_BS.shape, dtype=wide_type(x_BSH.dtype), device=x_BSH.device)
        log_p_BS[counts_BS] = head.scores(x_BSH[counts_BS], labels_BS[counts_BS])[0].to(log_p_BS.dtype)
        columns = {name: own(each) for name, each in probes.columns.items()}
        return dict(self.objective.of_probes(Labels(log_p_BS, weights_BS, columns, self.objective.sequences)))
