"""Costs of labels from their log-probabilities, numbers of the data and sums over sequences.

The loss of a step is L = sum of w * cost over its labels. A cost may depend on the log-probabilities of a whole
sequence, so it is known only after all chunks of the head. The head therefore computes them twice. The first pass is
without gradient. Autograd gives g = dL / d(log p) of each label from it, and the second pass trains on the sum of
-g * cross-entropy. Its gradient is that of L.

Ranks that share a sequence add up their sums. In the backward pass the gradients of sums are summed over these ranks.

Shapes: B samples, s labels of this rank in each, K sequences in a sample.

The file also has log-probabilities of given tokens over a vocabulary cut by rows, for evaluation, without gradients.

No tensor is larger than a chunk of logits, and only numbers per token cross the tensor axis. All numbers are fp32, as
in the loss (`cross_entropy`).

Shapes: N positions, H hidden, V vocabulary, t tensor parallel ranks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from ..layout.mesh import ALONE, Axis
from ..layout.precision import exp_
from .collectives import all_reduce, sum_over
from .cross_entropy import LossOptions, logits_of, own_labels

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


@torch.no_grad()
def token_scores(
    x_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    *,
    first: int = 0,
    axis: Axis = ALONE,
    options: LossOptions,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label, and the most likely id in its place.

    Args:
        x_NH: hidden states, equal on every rank of `axis`.
        weight_VH, bias_V: this rank's rows [V/t, H] of the head and part of its bias, or None.
        labels_N: ids of the whole vocabulary.
        first: id of this rank's first row.

    Returns:
        (log_probability [N] in nats, best [N] int64), equal on every rank of the axis. Of equally likely ids the lowest
        is the best one, as in `argmax` of one process.
    """
    step = options.chunk or max(1, x_NH.shape[0])
    found = [
        _chunk(x_NH[begin : begin + step], weight_VH, bias_V, labels_N[begin : begin + step], first, axis, options)
        for begin in range(0, max(1, x_NH.shape[0]), step)
    ]
    return torch.cat([each[0] for each in found]), torch.cat([each[1] for each in found])


def _chunk(
    x_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    first: int,
    axis: Axis,
    options: LossOptions,
) -> tuple[Tensor, Tensor]:
    logits_NV = logits_of(x_NH, weight_VH, bias_V, options)
    mine_N, local_N1 = own_labels(labels_N - first, logits_NV)
    own_N, index_N = logits_NV.max(1)
    max_N = all_reduce(own_N.clone(), axis, dist.ReduceOp.MAX)
    target_N = logits_NV.gather(1, local_N1).squeeze(1)
    sums = torch.stack([exp_(logits_NV - max_N.unsqueeze(1)).sum(1), target_N.masked_fill(~mine_N, 0.0)])
    total_N, target_N = all_reduce(sums, axis)
    # A rank without the largest logit names an id that no vocabulary has.
    best_N = torch.where(own_N == max_N, index_N + first, torch.iinfo(torch.int64).max)
    return target_N - max_N - total_N.log(), all_reduce(best_N, axis, dist.ReduceOp.MIN)
