"""What a layer remembers of the tokens it has routed since the last update, and the correction that evens the load.

Counts are of this rank's tokens; whoever runs the steps adds them up over data parallel ranks (all tensor parallel
ranks have routed the same tokens) and calls `finish` on every rank with the same sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.kinds.moe.options import MoEOptions
from megatron.model.expert_tally import LOSSES, ExpertTally
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.shard import Role

from .choice import classes


class Balance(ExpertTally):
    """Tallies of one layer and its correction.

    The correction is saved, and no parameter.
    """

    def __init__(self, make: ParameterFactory, options: MoEOptions):
        super().__init__()
        self.layer = next((int(word) for word in make.prefix.split(".") if word.isdigit()), 0)
        self.experts, self.options = options.experts, options.router
        self.correction: Tensor | None = None
        if options.router.correction != "none":
            self.correction = make.buffer("correction", (classes(options),), role=Role.ROUTER)
            self.correction[options.experts :] = -1.0
        self.tally = torch.zeros(options.experts + self.EXTRA, dtype=torch.float32, device=make.device)

    @torch.no_grad()
    def add(self, counts_E: Tensor, dropped: Tensor | None, losses: dict[str, Tensor]) -> None:
        """One micro-batch.

        Args:
            counts_E: how often each expert was chosen.
            dropped: number of choices without a place, or of no expert.
        """
        E = self.experts
        self.tally[:E] += counts_E
        if dropped is not None:
            self.tally[E] += dropped
        for place, name in enumerate(LOSSES, start=E + 1):
            if name in losses:
                self.tally[place] += losses[name].detach()
        self.tally[-1] += 1

    @torch.no_grad()
    def finish(self, counts_E: Tensor) -> None:
        """Move the correction by the choices of the step's whole batch (Wang et al. 2024, "Auxiliary-loss-free")."""
        if self.correction is not None:
            excess_E = counts_E.double() * self.experts - counts_E.double().sum()
            self.correction[: self.experts] -= self.options.correction_rate * torch.sign(excess_E).float()
