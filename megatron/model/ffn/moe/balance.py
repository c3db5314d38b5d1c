"""What a layer remembers of the tokens it has routed since the last update, and the correction that evens the load.

Counts are of this rank's tokens; whoever runs the steps adds them up over data parallel ranks (all tensor parallel ranks
have routed the same tokens) and calls `finish` on every rank with the same sums.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.config.sections.moe import MoEOptions
from megatron.parallel.parameters import ParameterFactory
from megatron.parallel.shard import Role

LOSSES = ("balance", "sequence", "z")


class Balance(nn.Module):
    """Tallies of one layer and its correction.

    Attributes:
        correction: fp32 [E], added to the scores where experts are chosen; saved, no parameter. None without one.
        tally: fp32 [E + 1 + 3 + 1]: tokens of each expert, dropped choices, sums of the losses, micro-batches.
    """

    def __init__(self, make: ParameterFactory, options: MoEOptions):
        super().__init__()
        self.experts, self.options = options.experts, options.router
        self.correction: Tensor | None = None
        if options.router.correction != "none":
            self.correction = make.kept("correction", (options.experts,), role=Role.ROUTER)
        self.tally = torch.zeros(options.experts + 1 + len(LOSSES) + 1, dtype=torch.float32, device=make.device)

    @torch.no_grad()
    def add(self, ends_E: Tensor, dropped: Tensor | None, losses: dict[str, Tensor]) -> None:
        """One micro-batch.

        Args:
            ends_E: ends of the experts' rows before anything is dropped.
            dropped: number of choices without a row.
        """
        E = self.experts
        self.tally[0] += ends_E[0]
        self.tally[1:E] += ends_E.diff()
        if dropped is not None:
            self.tally[E] += dropped
        for place, name in enumerate(LOSSES, start=E + 1):
            if name in losses:
                self.tally[place] += losses[name].detach()
        self.tally[-1] += 1

    @torch.no_grad()
    def finish(self, load_E: Tensor) -> None:
        """Move the correction by the load of the step's whole batch (Wang et al. 2024, "Auxiliary-loss-free")."""
        if self.correction is not None:
            self.correction += self.options.correction_rate * torch.sign(load_E.mean() - load_E)
