"""Costs of labels from their log-probabilities, numbers of the data and sums over sequences.

The loss of a step is L = sum of w * cost over its labels. A cost may depend on the log-probabilities of a whole
sequence, so it is known only after all chunks of the head. The head therefore computes them twice. The first pass is
without gradient. Autograd gives g = dL / d(log p) of each label from it, and the second pass trains on the sum of
-g * cross-entropy. Its gradient is that of L.

Ranks that share a sequence add up their sums. In the backward pass the gradients of sums are summed over these ranks.

Shapes: B samples, s labels of this rank in each, K sequences in a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ..layout.mesh import ALONE, Axis
from .collectives import sum_over

SEQUENCE = "sequence"  # the column that numbers the sequences of a sample from 0. -1: a label of none


@dataclass
class Labels:
    """The labels of a micro-batch that a rank has. Autograd records all uses of their log-probabilities.

    `units` has for each kind of labels (`Objective.counted`) the weight of one label in a mean over the step, and
    `known` the means of `Objective.of_probes`.

    Attributes:
        log_p_BS: log-probability of each label in nats, in at least fp32, or a scalar of the token before it
            (`Objective.scores`).
        weights_BS: of each label in the loss. A label of weight 0 does not count.
        columns: numbers of each label from the data, [B, s].
        sequences: K.
        axis: ranks that share samples.
        reported: weighted sums over labels.
    """

    log_p_BS: Tensor
    weights_BS: Tensor
    columns: Mapping[str, Tensor]
    sequences: int = 0
    axis: Axis = ALONE
    units: Mapping[str, Tensor | float] = field(default_factory=dict)
    known: Mapping[str, Tensor | float] = field(default_factory=dict)
    reported: dict[str, Tensor] = field(default_factory=dict)

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """The sequence of each label [B, s], and whether the label counts in one."""
        ids_BS = self.columns[SEQUENCE].long()
        within_BS = (ids_BS >= 0) & (ids_BS < self.sequences)
        return ids_BS.clamp(0, self.sequences - 1), within_BS & (self.weights_BS != 0)

    def sum(self, x_BS: Tensor) -> Tensor:
        """The sum over the labels of each sequence that count, [B, K], equal on all ranks that share the sample."""
        ids_BS, counts_BS = self._places
        sums_BK = x_BS.new_zeros(x_BS.shape[0], self.sequences)
        return sum_over(sums_BK.scatter_add(1, ids_BS, x_BS.masked_fill(~counts_BS, 0.0)), self.axis)

    @cached_property
    def lengths_BK(self) -> Tensor:
        """Number of labels of each sequence that count."""
        return self.sum(torch.ones_like(self.log_p_BS).detach())

    def mean(self, x_BS: Tensor, kind: str) -> Tensor:
        """The cost [B, s] by which the labels of a kind add the mean of x over all of them to the loss of the step.

        Args:
            x_BS: 0 for labels of no such kind.
        """
        counts_BS = self.weights_BS != 0
        unit = self.units[kind] / self.weights_BS.where(counts_BS, torch.ones_like(self.weights_BS))
        return (x_BS * unit).masked_fill(~counts_BS, 0.0)

    def spread(self, x_BK: Tensor) -> Tensor:
        """The number of its sequence for each label, [B, s]. 0 for labels that do not count in one."""
        ids_BS, counts_BS = self._places
        return x_BK.gather(1, ids_BS).masked_fill(~counts_BS, 0.0)

    def report(self, name: str, x_BS: Tensor) -> None:
        """Report the mean of this over the labels of the step, by weight."""
        self.reported[name] = (self.weights_BS * x_BS.detach()).sum(dtype=torch.float64)


class LabelsLoss:
    """The loss of an objective whose costs are made of `Labels`.

    Args:
        cost: of each label, [B, s].
        sequences: K.
        reports: names that `cost` reports, all of them in each call.
    """

    LOSS = "objective_loss"

    def __init__(self, cost: Callable[[Labels], Tensor], sequences: int, reports: tuple[str, ...] = ()) -> None:
        self.cost, self.sequences, self.names = cost, sequences, (self.LOSS, *reports)
        self.sums: Tensor | None = None  # of this step: float64, by name
        self.units: Mapping[str, Tensor | float] = {}  # of this step
        self.known: Mapping[str, Tensor | float] = {}
        self.costs_BS: Tensor | None = None  # of the last micro-batch

    def weights(
        self, ce_BS: Tensor, weights_BS: Tensor, columns: Mapping[str, Tensor], axis: Axis
    ) -> tuple[Tensor, Tensor]:
        """The weights [B, s] of the second pass, of any sign, and the loss of these labels.

        Args:
            ce_BS: cross-entropies of the first pass.

        Raises:
            ValueError: the number of costs is not that of labels.
        """
        with torch.enable_grad():
            log_p_BS = ce_BS.neg().requires_grad_()
            labels = Labels(log_p_BS, weights_BS.to(ce_BS.dtype), columns, self.sequences, axis, self.units, self.known)
            cost_BS = self.cost(labels)
            if cost_BS.shape != ce_BS.shape:
                raise ValueError(f"the objective must give {list(ce_BS.shape)} labels a cost: {list(cost_BS.shape)}")
            loss = (labels.weights_BS * cost_BS).sum()
            (slope_BS,) = torch.autograd.grad(loss, log_p_BS)
        labels.report(self.LOSS, cost_BS)
        self.costs_BS = cost_BS.detach()
        sums = torch.stack([labels.reported[name] for name in self.names])
        self.sums = sums if self.sums is None else self.sums + sums
        return -slope_BS, loss.detach()
