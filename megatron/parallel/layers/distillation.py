"""Head, cross-entropy and divergence from a teacher in one: as `cross_entropy`, with the logits of two models.

With the student's logits l, the teacher's u, a temperature T, p = softmax(u / T) and q = softmax(l / T), a label with
weight w costs
    w * ((1 - a) * c(E, Z) + a * T**2 * KL(p || q) + z * Z**2),    KL(p || q) = sum of p * (log p - log q)
(Hinton, Vinyals and Dean 2015, "Distilling the Knowledge in a Neural Network"; T**2 keeps the size of the gradient,
which falls with 1 / T**2). c, E, Z and z are those of `cross_entropy`. The gradient with respect to l is
    w * (((1 - a) (c'_E + c'_Z) + 2 z Z) softmax(l) - (1 - a) c'_E onehot(label) + a T (q - p)).
Both models' logits exist for one chunk of tokens at a time. Where tensor parallel ranks share the vocabulary, the
largest logits of a chunk are one message of theirs, and the sums another.

Shapes: N tokens, H hidden (each model its own), V vocabulary, t tensor parallel ranks, C tokens in a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..layout.mesh import ALONE, Axis
from ..layout.precision import exp_, wide_type
from .collectives import all_reduce
from .cross_entropy import Gradients, LossOptions, logits_of

PLAIN = LossOptions()


@dataclass(frozen=True)
class SoftLabels:
    """What a teacher says of each token, as the input of its head.

    Attributes:
        x_NH: that input, equal on every rank of the tensor axis.
        weight_VH: this rank's rows [V/t, H] of its head.
        bias_V: this rank's part of its bias, or None.
        options: its multiplier and cap of logits.
        share: a above, in (0, 1].
        temperature: T above.
    """

    x_NH: Tensor
    weight_VH: Tensor
    bias_V: Tensor | None
    options: LossOptions
    share: float
    temperature: float

    def logits(self, part: slice) -> Tensor:
        """This rank's logits [C, V/t] of some tokens, in fp32."""
        return logits_of(self.x_NH[part], self.weight_VH, self.bias_V, self.options)


class _LinearDistillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        weights_N: Tensor,
        soft: SoftLabels,
        first: int,
        axis: Axis,
        options: LossOptions,
        train: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        unit = weights_N.abs().amax().clamp(min=1e-30) if x_NH.dtype == torch.float16 else None
        unit_weights_N = weights_N if unit is None else weights_N / unit
        ce_N = torch.empty(x_NH.shape[0], dtype=wide_type(x_NH.dtype), device=x_NH.device)
        lse_N, kl_N = torch.empty_like(ce_N), torch.empty_like(ce_N)
        step = options.chunk or max(1, x_NH.shape[0])
        grads = Gradients(x_NH, weight_VH, bias_V, -(-x_NH.shape[0] // step)) if train else None
        for begin in range(0, x_NH.shape[0], step):
            part = slice(begin, begin + step)
            x_CH = x_NH[part]
            grad_CV = _chunk(
                logits_of(x_CH, weight_VH, bias_V, options),
                soft.logits(part),
                labels_N[part] - first,
                unit_weights_N[part],
                (soft.share, soft.temperature),
                axis,
                options,
                (ce_N[part], lse_N[part], kl_N[part]),
                train,
            )
            if grads is not None and grad_CV is not None:
                if grads.bias is not None:
                    grads.bias += grad_CV.sum(0)
                grads.add(part, grad_CV.mul_(options.multiplier).to(x_CH.dtype), x_CH, weight_VH)
        hard_N = (1.0 - soft.share) * options.costs(ce_N, lse_N) + options.z_loss * lse_N.square()
        loss = (weights_N * (hard_N + soft.share * soft.temperature**2 * kl_N)).sum()
        if grads is not None:
            ctx.save_for_backward(*grads.tensors(), unit)
            ctx.dtype = weight_VH.dtype
        ctx.mark_non_differentiable(ce_N, kl_N)
        return loss, ce_N, kl_N

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _grad_ce: Tensor, _grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        *grads, unit = ctx.saved_tensors
        scale = grad_loss if unit is None else grad_loss * unit
        dx, dweight, dbias = (None if each is None else each.mul_(scale) for each in grads)
        of_head = (None if each is None else each.to(ctx.dtype) for each in (dweight, dbias))
        return dx, *of_head, *(None,) * 7


def _chunk(
    logits_CV: Tensor,
    taught_CV: Tensor,
    local_C: Tensor,
    weights_C: Tensor,
    how: tuple[float, float],
    axis: Axis,
    options: LossOptions,
    found: tuple[Tensor, Tensor, Tensor],
    train: bool,
) -> Tensor | None:
    """Cross-entropy, logsumexp and divergence of one chunk into `found`.

    Args:
        local_C: labels, counted from this rank's first row.
        how: share and temperature.

    Returns:
        The gradient of the student's logits, before its multiplier; None without `train`.
    """
    (share, temperature), (ce_C, lse_C, kl_C) = how, found
    mine_C = (local_C >= 0) & (local_C < logits_CV.shape[1])
    local_C1 = local_C.clamp(0, max(0, logits_CV.shape[1] - 1)).unsqueeze(1)
    slope_CV = None
    if options.softcap is not None and train:
        slope_CV = 1.0 - (logits_CV / options.softcap).square()

    max_C, taught_max_C = all_reduce(torch.stack([logits_CV.amax(1), taught_CV.amax(1)]), axis, dist.ReduceOp.MAX)
    target_C = logits_CV.gather(1, local_C1).squeeze(1).masked_fill(~mine_C, 0.0)
    logits_CV.sub_(max_C.unsqueeze(1))  # both are this chunk's alone
    taught_CV.sub_(taught_max_C.unsqueeze(1))
    exp_CV = exp_(logits_CV.clone())
    soft_CV = exp_CV if temperature == 1.0 else exp_(logits_CV / temperature)
    p_CV = exp_(taught_CV / temperature)
    cross_C = (p_CV * (taught_CV - logits_CV)).sum(1) / temperature
    sums = torch.stack([exp_CV.sum(1), target_C, soft_CV.sum(1), p_CV.sum(1), cross_C])
    total_C, target_C, soft_total_C, p_total_C, cross_C = all_reduce(sums, axis)
    torch.add(max_C, total_C.log(), out=lse_C)
    torch.sub(lse_C, target_C, out=ce_C)
    torch.add(cross_C / p_total_C, soft_total_C.log() - p_total_C.log(), out=kl_C)
    if not train:
        return None

    of_ce, of_lse = (each * (1.0 - share) for each in options.slopes(ce_C, lse_C))
    scale_C = weights_C * (of_ce + of_lse + 2.0 * options.z_loss * lse_C) / total_C
    pull_C = weights_C * (share * temperature)
    grad_CV = exp_CV * scale_C.unsqueeze(1)
    grad_CV.addcmul_(soft_CV, (pull_C / soft_total_C).unsqueeze(1))
    grad_CV.addcmul_(p_CV, (-pull_C / p_total_C).unsqueeze(1))
    grad_CV.scatter_add_(1, local_C1, (-weights_C * of_ce * mine_C).unsqueeze(1))
    return grad_CV if slope_CV is None else grad_CV.mul_(slope_CV)


def linear_distillation(
    x_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    weights_N: Tensor,
    soft: SoftLabels,
    *,
    first: int = 0,
    axis: Axis = ALONE,
    options: LossOptions = PLAIN,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted sum of token losses, each token's cross-entropy, and each token's divergence from the teacher.

    Args:
        soft: what the teacher says; no gradient reaches it.
        others: as of `linear_cross_entropy`.

    Returns:
        (loss, ce_N, kl_N): a differentiable fp32 scalar; detached cross-entropies; detached KL(p || q) at the
        temperature, without its square. All in nats.
    """
    weights_N = weights_N.to(wide_type(x_NH.dtype))
    train = torch.is_grad_enabled() and (x_NH.requires_grad or weight_VH.requires_grad)
    return _LinearDistillation.apply(x_NH, weight_VH, bias_V, labels_N, weights_N, soft, first, axis, options, train)
