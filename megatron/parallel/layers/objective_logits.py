"""The logits of a chunk of tokens as the cost of an objective reads them, over a vocabulary that ranks share.

Each tensor parallel rank has the logits of its own ids. A cost takes sums over the whole vocabulary with
`ChunkLogits.sum`, so all t ranks compute the same costs. Autograd differentiates the mean of these t copies: a sum over
ranks is a sum over ranks in the backward pass too. That is exact for every composition of sums, such as the entropy,
whose terms have the logsumexp in them.

Shapes: C tokens, V vocabulary, t tensor parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..layout.mesh import ALONE, Axis
from .collectives import all_reduce
from .cross_entropy import LossOptions

AGREE = 1e-3  # relative: costs of two ranks differ by rounding at most


class SumOverRanks(torch.autograd.Function):
    """The sum over an axis, and the sum of gradients over it in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_reduce(x.clone(), axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad.clone(), ctx.axis), None


@dataclass
class ChunkLogits:
    """The logits of some tokens, after multiplier, bias and cap, in at least fp32. Autograd sees all that is made of
    them. No tensor of it may be changed in place.

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
        """The logsumexp and the label's logit, which are one message."""
        largest_C = self.largest(self.own_CV)
        parts = (self.own_CV - largest_C.unsqueeze(1)).exp().sum(1), self._own_of(self.local_C.unsqueeze(1)).squeeze(1)
        total_C, label_C = SumOverRanks.apply(torch.stack(parts), self.axis)
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
        """The sum over the vocabulary, equal on all ranks: [..., V/t] of this rank's ids to [...]; one message."""
        return SumOverRanks.apply(x.sum(-1), self.axis)

    def largest(self, x_CV: Tensor) -> Tensor:
        """The maximum over the vocabulary [C], without gradient; one message."""
        return all_reduce(x_CV.detach().amax(1), self.axis, dist.ReduceOp.MAX)

    def of(self, ids_CK: Tensor) -> Tensor:
        """The logits of K ids of the vocabulary for each token, [C, K], equal on all ranks; one message."""
        return SumOverRanks.apply(self._own_of(ids_CK - self.first), self.axis)

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

    def chunk(
        self,
        part: slice,
        logits_CV: Tensor,
        local_C: Tensor,
        weights_C: Tensor,
        axis: Axis,
        options: LossOptions,
        found: tuple[Tensor, Tensor, Tensor],
        train: bool,
    ) -> Tensor | None:
        """As `OwnLoss.chunk`.

        Raises:
            ValueError: the number of costs is not that of labels, or they differ between tensor parallel ranks.
        """
        with torch.set_grad_enabled(train):
            logits = ChunkLogits(logits_CV.detach().requires_grad_(train), local_C, self.vocabulary, self.first, axis)
            cost_C = self.cost(logits)
            if cost_C.shape != local_C.shape:
                wanted = local_C.numel()
                raise ValueError(f"the objective's cost must have one value per label, {wanted}: {cost_C.shape}")
            self._compare(cost_C.detach(), axis)
            whole_C = cost_C + options.z_loss * logits.lse_C.square() if options.z_loss else cost_C
            total = (weights_C * whole_C).sum() / axis.size
            grad_CV = torch.autograd.grad(total, logits.own_CV)[0] if train else None
        for one, value in zip(found, (logits.ce_C, logits.lse_C, cost_C), strict=True):
            one.copy_(value.detach())
        return grad_CV

    def _compare(self, cost_C: Tensor, axis: Axis) -> None:
        """Whether ranks agree, once: a cost that sums its own ids only would give each rank another gradient."""
        if self._compared or axis.size == 1 or hasattr(cost_C, "fake_mode"):
            return
        self._compared = True
        largest_C, negated_C = all_reduce(torch.stack([cost_C, -cost_C]), axis, dist.ReduceOp.MAX)
        if not bool(((largest_C + negated_C) <= AGREE * (1 + largest_C.abs())).all()):
            raise ValueError(
                "the objective's cost must be the same on all tensor parallel ranks: what it takes of the vocabulary "
                "must go through ChunkLogits.sum, largest or of"
            )
