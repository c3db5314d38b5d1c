"""Counts of a layer with experts in a step, for the engine, which knows no kind of layer."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

LOSSES = ("balance", "sequence", "z")


class ExpertTally(nn.Module):
    """Base of a module in a layer whose `LayerKind.experts` is not 0."""

    EXTRA = 1 + len(LOSSES) + 1  # numbers of the tally after the experts'

    layer: int  # its number in the stack
    experts: int  # their number
    tally: Tensor  # fp32 [E + 1 + 3 + 1]: tokens of each expert, dropped choices, sums of `LOSSES`, micro-batches
    correction: Tensor | None  # fp32 [E] or longer, added to the scores that choose experts. None without one.
    recorded: list[Tensor] | None = None  # the experts int64 [T, k] of each pass, if it is a list

    def finish(self, counts_E: Tensor) -> None:
        """Act on the choices [E] of the step's whole batch, after an update that was applied."""


@contextmanager
def recorded(model: nn.Module) -> Iterator[dict[int, list[Tensor]]]:
    """Layer -> the experts int64 [T, k] that its tokens use in each pass within, best first."""
    tallies = {each.layer: each for each in model.modules() if isinstance(each, ExpertTally)}
    found: dict[int, list[Tensor]] = {layer: [] for layer in tallies}
    try:
        for layer, each in tallies.items():
            each.recorded = found[layer]
        yield found
    finally:
        for each in tallies.values():
            each.recorded = None
