"""Logits of a chunk of tokens for the cost of an objective, over a vocabulary that ranks share.

Each tensor parallel rank has the logits of its own ids. A cost takes sums over the whole vocabulary with
`ChunkLogits.sum`, so all t ranks compute the same costs. Autograd differentiates the mean of these t copies, and a sum
over ranks is one in the backward pass too. That is exact for every composition of sums, such as the entropy, whose
terms contain the logsumexp.

Shapes: C tokens, V vocabulary, t tensor parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..layout.mesh import ALONE, Axis
from .collectives import all_reduce, sum_over
from .cross_entropy import LossChunk, LossOptions, one_per_label

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
