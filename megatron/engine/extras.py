"""What a step tells beside its loss and norm: experts' loads, losses of further tokens, largest logits, ..."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, MutableMapping
from typing import Any, cast

import torch
from torch import nn

from megatron.config import Config
from megatron.config.variants import used_kinds
from megatron.model.stack import ModelPlan
from megatron.parallel.layers.collectives import all_reduce
from megatron.parallel.layout.mesh import Mesh

from .arriving import Arriving
from .expert_load import ExpertLoad
from .further_losses import FurtherLosses
from .logit_clipping import LogitClipping
from .micro_batches import LossAccumulator
from .protocol import DIVERGENCE, PASSES, PASSES_BACKWARD
from .state import EngineState


class StepExtras:
    """Closes a step in the modules that count while it runs.

    Args:
        module: this rank's layers.
        state: what the clipping of logits shrinks.
    """

    def __init__(
        self, module: nn.Module, config: Config, mesh: Mesh, device: torch.device, plan: ModelPlan, state: EngineState
    ) -> None:
        self.mesh, self.depth = mesh, plan.depth
        self.experts = ExpertLoad(module, config, mesh, device)
        self.further = FurtherLosses(module, config, mesh, device)
        clips = any(kind.clips_logits(options) for _, kind, options in used_kinds(config.model))
        self.logits = LogitClipping(module, mesh, state, device, clips)

    def finish(self, applied: bool, losses: LossAccumulator) -> Mapping[str, Any]:
        """Close a step: every rank calls it.

        Args:
            applied: whether the update was; routers are corrected and logits clipped after an update alone.
            losses: of this rank's labels.

        Returns:
            For the record, equal on all ranks. Most of it is read from the device when somebody asks.
        """
        loads, logits = self.experts.finish(applied), self.logits.finish(applied)
        more = {**logits, **self._depth(), **self._divergence(losses)}
        parts = [each for each in (loads, self.further.finish(), more) if each]
        return (parts or [{}])[0] if len(parts) < 2 else ChainMap(*cast("list[MutableMapping[str, Any]]", parts))

    def _divergence(self, losses: LossAccumulator) -> Mapping[str, Any]:
        """The mean divergence from the teacher over the labels that count, by weight; of all ranks."""
        if losses.divergence is None:
            return {}
        both = all_reduce(torch.stack([losses.divergence, losses.weight]), self.mesh.replicas)
        return {DIVERGENCE: Arriving(both[0] / both[1])}

    def _depth(self) -> Mapping[str, Any]:
        """What the step ran of a recurrent core."""
        if self.depth is None:
            return {}
        passes = self.depth.passes(training=True)
        return {PASSES: passes.total, PASSES_BACKWARD: passes.backward}
