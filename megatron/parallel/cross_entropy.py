"""Head and cross-entropy in one: logits exist for one chunk of tokens at a time, over a vocabulary cut by rows.

With logits l = cap(m * W x + b), Z = logsumexp(l), the loss of a token with weight w is
    w * (Z - l[label] + z * Z**2)
and its gradient with respect to l is  w * ((1 + 2 z Z) softmax(l) - onehot(label)).
Both are known as soon as the chunk's logits are, so the gradients of x and W are computed in the forward pass
and no logits are kept: memory is one chunk of [chunk, V/t] instead of several [N, V/t] (the idea of fused
linear cross-entropy; Hsu et al. 2024, "Liger Kernel"). All of it in fp32 whatever the type of x and W.

The loss scale of fp16 training reaches the gradients only in the backward pass, after their products in fp16. So
there the forward pass takes weights of at most 1, whose gradients fp16 can hold, and the backward pass makes up for it.

Shapes: N tokens, H hidden, V vocabulary, t tensor parallel ranks, C tokens in a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import all_reduce
from .mesh import ALONE, Axis
from .precision import at_least_fp32, wide_type


@dataclass(frozen=True)
class LossOptions:
    """multiplier and softcap of the logits, coefficient z of the z-loss, tokens per chunk (0: all)."""

    multiplier: float = 1.0
    softcap: float | None = None
    z_loss: float = 0.0
    chunk: int = 1024


def logits_of(
    x_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, options: LossOptions, out: Tensor | None = None
) -> Tensor:
    """This rank's logits [N, V/t] in fp32; `out` is memory for the product."""
    logits = at_least_fp32(torch.matmul(x_NH, weight_VH.T, out=out))
    if options.multiplier != 1.0:
        logits = logits * options.multiplier
    if bias_V is not None:
        logits = logits + at_least_fp32(bias_V)
    return logits if options.softcap is None else options.softcap * torch.tanh(logits / options.softcap)


@lru_cache(maxsize=1)
def _chunk_memory(tokens: int, words: int) -> Tensor:
    """Memory of a chunk's logits on CPU, kept for the next chunk and step.

    The C library gives so large a block back at once and the kernel clears the next one page by page: 8 to 14 % of the
    time of the loss. GPUs need none of this: torch keeps their memory.
    """
    return torch.empty(tokens, words)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_NH, weight_VH, bias_V, labels_N, weights_N, first, axis, options, train):
        grads = _Gradients(x_NH, weight_VH, bias_V) if train else None
        unit = weights_N.abs().amax().clamp(min=1e-30) if x_NH.dtype == torch.float16 else None
        unit_weights_N = weights_N if unit is None else weights_N / unit
        ce_N = torch.empty(x_NH.shape[0], dtype=wide_type(x_NH.dtype), device=x_NH.device)
        lse_N = torch.empty_like(ce_N)
        step = options.chunk or max(1, x_NH.shape[0])
        for begin in range(0, x_NH.shape[0], step):
            part = slice(begin, begin + step)
            _chunk(part, x_NH, weight_VH, bias_V, labels_N, unit_weights_N, first, axis, options, ce_N, lse_N, grads)
        loss = (weights_N * (ce_N + options.z_loss * lse_N.square())).sum()
        if train:
            ctx.save_for_backward(*grads.tensors(), unit)
            ctx.dtype = weight_VH.dtype
        ctx.mark_non_differentiable(ce_N)
        return loss, ce_N

    @staticmethod
    def backward(ctx, grad_loss, _grad_ce):
        # Scaled where they are, for one of them is as large as the head. A second backward pass is an error of
        # autograd.
        *grads, unit = ctx.saved_tensors
        scale = grad_loss if unit is None else grad_loss * unit
        dx, dweight, dbias = (None if each is None else each.mul_(scale) for each in grads)
        return (
            dx,
            dweight.to(ctx.dtype),
            None if dbias is None else dbias.to(ctx.dtype),
            None,
            None,
            None,
            None,
            None,
            None,
        )


class _Gradients:
    """Accumulators of the gradients of the sum of losses."""

    def __init__(self, x_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None):
        self.x = torch.empty_like(x_NH)
        self.weight = torch.zeros_like(weight_VH, dtype=wide_type(weight_VH.dtype))
        self.bias = None if bias_V is None else torch.zeros_like(bias_V, dtype=wide_type(bias_V.dtype))
        self.dtype = weight_VH.dtype

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        if self.dtype == torch.float16:  # they are not yet of their final size
            return self.x, self.weight, self.bias
        return self.x, self.weight.to(self.dtype), None if self.bias is None else self.bias.to(self.dtype)


def _chunk(part, x_NH, weight_VH, bias_V, labels_N, weights_N, first, axis, options, ce_N, lse_N, grads) -> None:
    """Loss of one chunk into ce_N and lse_N, and its gradients into `grads`."""
    x_CH, weights_C = x_NH[part], weights_N[part]
    out = None
    if x_CH.device.type == "cpu" and x_CH.dtype == torch.float32 and options.chunk:
        out = _chunk_memory(min(options.chunk, x_NH.shape[0]), weight_VH.shape[0])[: x_CH.shape[0]]
    logits_CV = logits_of(x_CH, weight_VH, bias_V, options, out)
    local_C = labels_N[part] - first
    mine_C = (local_C >= 0) & (local_C < logits_CV.shape[1])
    local_C = local_C.clamp(0, max(0, logits_CV.shape[1] - 1)).unsqueeze(1)

    max_C = all_reduce(logits_CV.amax(1), axis, dist.ReduceOp.MAX)
    target_C = logits_CV.gather(1, local_C).squeeze(1).masked_fill(~mine_C, 0.0)
    slope_CV = None
    if options.softcap is not None and grads is not None:
        slope_CV = 1.0 - (logits_CV / options.softcap).square()
    exp_CV = logits_CV.sub_(max_C.unsqueeze(1)).exp_()
    total_C, target_C = all_reduce(torch.stack([exp_CV.sum(1), target_C]), axis)
    lse_C = max_C + total_C.log()
    ce_N[part], lse_N[part] = lse_C - target_C, lse_C
    if grads is None:
        return

    scale_C = weights_C * (1.0 + 2.0 * options.z_loss * lse_C) / total_C
    grad_CV = exp_CV.mul_(scale_C.unsqueeze(1))
    grad_CV.scatter_add_(1, local_C, (-weights_C * mine_C).unsqueeze(1))
    if slope_CV is not None:
        grad_CV.mul_(slope_CV)
    if grads.bias is not None:
        grads.bias += grad_CV.sum(0)
    if options.multiplier != 1.0:
        grad_CV.mul_(options.multiplier)
    grad_CV = grad_CV.to(x_NH.dtype)
    grads.x[part] = grad_CV @ weight_VH
    if grads.weight.dtype == grad_CV.dtype:
        grads.weight.addmm_(grad_CV.T, x_CH)
    else:
        grads.weight += grad_CV.T @ x_CH


def linear_cross_entropy(
    x_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    weights_N: Tensor,
    *,
    first: int = 0,
    axis: Axis = ALONE,
    options: LossOptions = LossOptions(),
) -> tuple[Tensor, Tensor]:
    """Weighted sum of token losses, and each token's cross-entropy.

    Args:
        x_NH: hidden states, equal on every rank of `axis`; their gradient is partial (enter a tensor region first).
        weight_VH: this rank's rows [V/t, H] of the head.
        bias_V: this rank's part of its bias, or None.
        labels_N: target ids of the whole vocabulary.
        weights_N: weight of each token in the sum.
        first: id of this rank's first row.

    Returns:
        (loss, ce_N): a differentiable fp32 scalar with the z-loss, and detached cross-entropies in nats.
    """
    weights_N = weights_N.to(wide_type(x_NH.dtype))
    train = torch.is_grad_enabled() and (x_NH.requires_grad or weight_VH.requires_grad)
    return _LinearCrossEntropy.apply(x_NH, weight_VH, bias_V, labels_N, weights_N, first, axis, options, train)
