"""Counts of a layer with experts in a step, for the engine, which knows no kind of layer."""

from __future__ import annotations

from torch import Tensor, nn

LOSSES = ("balance", "sequence", "z")


class ExpertTally(nn.Module):
    """Base of a module in a layer whose `LayerKind.experts` is not 0.

    Attributes:
        layer: its number in the stack.
        experts: their number.
        tally: fp32 [E + 1 + 3 + 1]: tokens of each expert, dropped choices, sums of `LOSSES`, micro-batches.
        correction: fp32 [E] or longer, added to the scores that choose experts. None without one.
    """

    EXTRA = 1 + len(LOSSES) + 1  # numbers of the tally after the experts'

    layer: int
    experts: int
    tally: Tensor
    correction: Tensor | None

    def finish(self, counts_E: Tensor) -> None:
        """Act on the choices [E] of the step's whole batch, after an update that was applied."""
