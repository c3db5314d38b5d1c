"""Log-probabilities of given tokens over a vocabulary cut by rows, for evaluation, without gradients.

No tensor is larger than a chunk of logits, and only numbers per token cross the tensor axis. All numbers are fp32, as
in the loss (`cross_entropy`).

Shapes: N positions, H hidden, V vocabulary, t tensor parallel ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..layout.mesh import ALONE, Axis
from ..layout.precision import exp_
from .collectives import all_reduce
from .cross_entropy import LossOptions, logits_of, own_labels


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
