"""The divergence from a teacher as a loss of `cross_entropy`, with the logits of two models.

With the student's logits l, the teacher's u, a temperature T, p = softmax(u / T) and q = softmax(l / T), a label with
weight w costs
    w * ((1 - a) * c(E, Z) + a * T**2 * KL(p || q) + z * Z**2),    KL(p || q) = sum of p * (log p - log q)
(Hinton, Vinyals and Dean 2015, "Distilling the Knowledge in a Neural Network". T**2 keeps the size of the gradient,
which falls with 1 / T**2). c, E, Z and z are as in `cross_entropy`. The gradient with respect to l is
    w * (((1 - a) (c'_E + c'_Z) + 2 z Z) softmax(l) - (1 - a) c'_E onehot(label) + a T (q - p)).
Logits of both models exist for one chunk of tokens at a time. Tensor parallel ranks that share the vocabulary send the
largest logits of a chunk in one message, and the sums in another.

Shapes: N tokens, H hidden (each model its own), V vocabulary, t tensor parallel ranks, C tokens in a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..layout.precision import exp_
from .collectives import all_reduce
from .cross_entropy import LossChunk, LossOptions, logits_of, own_labels


@dataclass(frozen=True)
class SoftLabels:
    """The `OwnLoss` of a teacher. Its own number is KL(p || q) at the temperature, in nats, without the factor T**2.

    No gradient reaches the teacher.

    Attributes:
        x_NH: input of the teacher's head, equal on every rank of the tensor axis.
        weight_VH: this rank's rows [V/t, H] of that head.
        bias_V: this rank's part of its bias, or None.
        options: multiplier and cap of the teacher's logits.
        share: a above, in (0, 1].
        temperature: T above.
    """

    x_NH: Tensor
    weight_VH: Tensor
    bias_V: Tensor | None
    options: LossOptions
    share: float
    temperature: float
    reports: ClassVar[bool] = True

    def costs(self, options: LossOptions, ce_N: Tensor, lse_N: Tensor, own_N: Tensor) -> Tensor:
        return (1.0 - self.share) * options.costs(ce_N, lse_N) + self.share * self.temperature**2 * own_N

    def chunk(self, chunk: LossChunk) -> Tensor | None:
        share, temperature, logits_CV, weights_C = self.share, self.temperature, chunk.logits_CV, chunk.weights_C
        taught_CV = logits_of(self.x_NH[chunk.part], self.weight_VH, self.bias_V, self.options)
        mine_C, local_C1 = own_labels(chunk.local_C, logits_CV)
        largest = torch.stack([logits_CV.amax(1), taught_CV.amax(1)])
        max_C, taught_max_C = all_reduce(largest, chunk.axis, dist.ReduceOp.MAX)
        target_C = logits_CV.gather(1, local_C1).squeeze(1).masked_fill(~mine_C, 0.0)
        logits_CV.sub_(max_C.unsqueeze(1))  # no other reader has these logits
        taught_CV.sub_(taught_max_C.unsqueeze(1))
        exp_CV = exp_(logits_CV.clone())
        soft_CV = exp_CV if temperature == 1.0 else exp_(logits_CV / temperature)
        p_CV = exp_(taught_CV / temperature)
        cross_C = (p_CV * (taught_CV - logits_CV)).sum(1) / temperature
        sums = torch.stack([exp_CV.sum(1), target_C, soft_CV.sum(1), p_CV.sum(1), cross_C])
        total_C, target_C, soft_total_C, p_total_C, cross_C = all_reduce(sums, chunk.axis)
        torch.add(max_C, total_C.log(), out=chunk.lse_C)
        torch.sub(chunk.lse_C, target_C, out=chunk.ce_C)
        torch.add(cross_C / p_total_C, soft_total_C.log() - p_total_C.log(), out=chunk.own_C)
        if not chunk.train:
            return None

        of_ce, of_lse = (each * (1.0 - share) for each in chunk.options.slopes(chunk.ce_C, chunk.lse_C))
        scale_C = weights_C * (of_ce + of_lse + 2.0 * chunk.options.z_loss * chunk.lse_C) / total_C
        pull_C = weights_C * (share * temperature)
        grad_CV = exp_CV * scale_C.unsqueeze(1)
        grad_CV.addcmul_(soft_CV, (pull_C / soft_total_C).unsqueeze(1))
        grad_CV.addcmul_(p_CV, (-pull_C / p_total_C).unsqueeze(1))
        grad_CV.scatter_add_(1, local_C1, (-weights_C * of_ce * mine_C).unsqueeze(1))
        return grad_CV
