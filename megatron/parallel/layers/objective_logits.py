"""Logits of a chunk of tokens for the cost of an objective, over a vocabulary that ranks share.

Each tensor parallel rank has the logits of its own ids. A cost takes sums over the whole vocabulary with
`ChunkLogits.sum`, so all t ranks compute the same costs. Autograd differentiates the mean of these t copies, and a sum
over ranks is one in the backward pass too. That is exact for every composition of sums, such as the entropy, whose
terms contain the logsumexp.

Shapes: C tokens, V vocabulary, t tensor parallel ranks.

The divergence from a teacher as a loss of `cross_entropy`, with the logits of two models.

With the student's logits l, the teacher's u, a temperature T, p = softmax(u / T) and q = softmax(l / T), a label with
weight w costs
    w * ((1 - a) * c(E, Z) + a * T**2 * KL(p || q) + z * Z**2),    KL(p || q) = sum of p * (log p - log q)
(Hinton, Vinyals and Dean 2015, "Distilling the Knowledge in a Neural Network". T**2 keeps the size of the gradient,
which falls with 1 / T**2). c, E, Z and z are as in `cross_entropy`. The gradient with respect to l is
    w * (((1 - a) (c'_E + c'_Z) + 2 z Z) softmax(l) - (1 - a) c'_E onehot(label) + a T (q - p)).
Logits of both models exist for one chunk of tokens at a time. Tensor parallel ranks that share the vocabulary send the
largest logits of a chunk in one message, and the sums in another.

Shapes: N tokens, H hidden (each model its own), V vocabulary, t tensor parallel ranks, C tokens in a chunk."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..layout.mesh import ALONE, Axis
from ..layout.precision import exp_
from .collectives import all_reduce, sum_over
from .cross_entropy import LossChunk, LossOptions, logits_of, one_per_label, own_labels

AGREE = 1e-3  # relative: costs of two ranks differ by rounding at most


@dataclass
class ChunkLogits:
    """Logits of some tokens, after multiplier, bias and cap, in at least fp32.

    Autograd records all uses. No tensor may be changed in place.

    Attributes:
        own_CV: logits of this rank's ids, [C, V/t]. Column 0 is the id `first`.
        local_C: labels, counted from `first`. Labels of other ranks are below 0, or at least V/t.
        vocabulary: V.
        axis: the ranks that share the vocabulary.
    """

    own_CV: Tensor
    local_C: Tensor
    vocabulary: int
    first: int = 0
    axis: Axis = ALONE

    @property
    def labels_C(self) -> Tensor:
        """Ids of the whole vocabulary, int64 [C]."""
        return self.local_C + self.first

    @cached_property
    def _both(self) -> tuple[Tensor, Tensor]:
        """The logsumexp and the label's logit, in one message."""
        largest_C = self.largest(self.own_CV)
        parts = (self.own_CV - largest_C.unsqueeze(1)).exp().sum(1), self._own_of(self.local_C.unsqueeze(1)).squeeze(1)
        total_C, label_C = sum_over(torch.stack(parts), self.axis)
        return largest_C + total_C.log(), label_C

    @property
    def lse_C(self) -> Tensor:
        """Log of the sum of exp(logit) over the vocabulary, [C]."""
        return self._both[0]

    @property
    def ce_C(self) -> Tensor:
        """Cross-entropy of the label in nats, [C]."""
        return self._both[0] - self._both[1]

    @property
    def log_p_CV(self) -> Tensor:
        """Log-probabilities of this rank's ids, [C, V/t]."""
        return self.own_CV - self.lse_C.unsqueeze(1)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the vocabulary, equal on all ranks: [..., V/t] of this rank's ids to [...]. One message."""
        return sum_over(x.sum(-1), self.axis)

    def largest(self, x_CV: Tensor) -> Tensor:
        """The maximum over the vocabulary [C], without gradient. One message."""
        return all_reduce(x_CV.detach().amax(1), self.axis, dist.ReduceOp.MAX)

    def of(self, ids_CK: Tensor) -> Tensor:
        """The logits of K ids of the vocabulary for each token, [C, K], equal on all ranks. One message."""
        return sum_over(self._own_of(ids_CK - self.first), self.axis)

    def _own_of(self, local_CK: Tensor) -> Tensor:
        own = self.own_CV.shape[1]
        mine = (local_CK >= 0) & (local_CK < own)
        return self.own_CV.gather(1, local_CK.clamp(0, own - 1)).masked_fill(~mine, 0.0)


@dataclass
class LogitsLoss:
    """The `OwnLoss` of an objective that reads logits.

    Attributes:
        cost: of each label [C], in nats.
        vocabulary: V.
        first: id of this rank's first row.
    """

    cost: Callable[[ChunkLogits], Tensor]
    vocabulary: int
    first: int = 0
    reports: ClassVar[bool] = False
    _compared: bool = field(default=False, repr=False)

    def costs(self, options: LossOptions, ce_N: Tensor, lse_N: Tensor, own_N: Tensor) -> Tensor:
        return own_N

    def chunk(self, chunk: LossChunk) -> Tensor | None:
        """As `OwnLoss.chunk`.

        Raises:
            ValueError: the number of costs is not that of labels, or they differ between tensor parallel ranks.
        """
        axis, z_loss = chunk.axis, chunk.options.z_loss
        with torch.set_grad_enabled(chunk.train):
            own_CV = chunk.logits_CV.detach().requires_grad_(chunk.train)
            logits = ChunkLogits(own_CV, chunk.local_C, self.vocabulary, self.first, axis)
            cost_C = one_per_label(self.cost(logits), chunk.local_C)
            self._compare(cost_C.detach(), axis)
            whole_C = cost_C + z_loss * logits.lse_C.square() if z_loss else cost_C
            total = (chunk.weights_C * whole_C).sum() / axis.size
            grad_CV = torch.autograd.grad(total, own_CV)[0] if chunk.train else None
        for number, value in ((chunk.ce_C, logits.ce_C), (chunk.lse_C, logits.lse_C), (chunk.own_C, cost_C)):
            number.copy_(value.detach())
        return grad_CV

    def _compare(self, cost_C: Tensor, axis: Axis) -> None:
        """Check once that ranks agree: a cost that sums only its own ids would give each rank another gradient."""
        if self._compared or axis.size == 1 or hasattr(cost_C, "fake_mode"):
            return
        self._compared = True
        largest_C, negated_C = all_reduce(torch.stack([cost_C, -cost_C]), axis, dist.ReduceOp.MAX)
        if not bool(((largest_C + negated_C) <= AGREE * (1 + largest_C.abs())).all()):
            raise ValueError(
                "the objective's cost must be the same on all tensor parallel ranks: all that it computes over the "
                "vocabulary must go through ChunkLogits.sum, largest or of"
            )


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
