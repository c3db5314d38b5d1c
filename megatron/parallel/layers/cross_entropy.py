"""Head and cross-entropy in one: logits exist for one chunk of tokens at a time, over a vocabulary cut by rows.

With logits l = cap(m * W x + b), Z = logsumexp(l), E = Z - l[label], the loss of a token with weight w is
    w * (c(E, Z) + z * Z**2)
where the cost c is E unless an objective has another. With c' its derivatives, the gradient with respect to l is
    w * ((c'_E + c'_Z + 2 z Z) softmax(l) - c'_E onehot(label)).
Both are known as soon as the chunk's logits are, so the gradients of x and W are computed in the forward pass
and no logits are kept: memory is one chunk of [chunk, V/t] instead of several [N, V/t] (the idea of fused
linear cross-entropy; Hsu et al. 2024, "Liger Kernel"). All of it in fp32 whatever the type of x and W.

The loss scale of fp16 training reaches the gradients only in the backward pass, after their products in fp16. So
there the forward pass takes weights of at most 1, whose gradients fp16 can hold, and the backward pass makes up for it.

An `OwnLoss` computes something else from a chunk's logits: a divergence from a teacher (`distillation.py`), or the
cost of an objective that reads logits (`objective_logits.py`).

Shapes: N tokens, H hidden, V vocabulary, t tensor parallel ranks, C tokens in a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..fallback import Fallback
from ..layout.mesh import ALONE, Axis
from ..layout.precision import at_least_fp32, exp_, wide_type
from .collectives import all_reduce


@dataclass(frozen=True)
class LossOptions:
    """How the loss is computed.

    Attributes:
        multiplier, softcap: of the logits.
        z_loss: coefficient of the z-loss.
        chunk: tokens in a chunk; 0: all.
        compiled: what is done to each logit is one kernel of torch.compile's per pass over them, on GPUs.
        cost: of each label, from (cross-entropy, logsumexp), [N] each; None: the cross-entropy.
    """

    multiplier: float = 1.0
    softcap: float | None = None
    z_loss: float = 0.0
    chunk: int = 1024
    compiled: bool = False
    cost: Callable[[Tensor, Tensor], Tensor] | None = None

    def costs(self, ce_N: Tensor, lse_N: Tensor) -> Tensor:
        """Of each label, without the z-loss.

        Raises:
            ValueError: there are not as many costs as labels.
        """
        if self.cost is None:
            return ce_N
        costs_N = self.cost(ce_N, lse_N)
        if costs_N.shape != ce_N.shape:
            raise ValueError(f"the objective's cost must have one value per label, {ce_N.numel()}: {costs_N.shape}")
        return costs_N

    def slopes(self, ce_N: Tensor, lse_N: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """The derivatives of each label's cost with respect to its cross-entropy and its logsumexp."""
        if self.cost is None:
            return 1.0, 0.0
        with torch.enable_grad():
            both = ce_N.detach().requires_grad_(), lse_N.detach().requires_grad_()
            found = torch.autograd.grad(self.costs(*both).sum(), both, allow_unused=True, materialize_grads=True)
        return found[0], found[1]


def logits_of(x_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, options: LossOptions) -> Tensor:
    """This rank's logits [N, V/t] in fp32."""
    return _logits_of(at_least_fp32(x_NH @ weight_VH.T), bias_V, options)


def _logits_of(logits: Tensor, bias_V: Tensor | None, options: LossOptions) -> Tensor:
    """From the product of hidden states and head, whose memory they have where nothing changes them."""
    if options.multiplier != 1.0:
        logits = logits * options.multiplier
    if bias_V is not None:
        logits = logits + at_least_fp32(bias_V)
    return logits if options.softcap is None else options.softcap * torch.tanh(logits / options.softcap)


ROW_BYTES = 2**22  # of fp32 logits that are looked at together on CPU: they stay in a processor's cache


@lru_cache(maxsize=2)
def _chunk_memory(tokens: int, words: int, dtype: torch.dtype) -> Tensor:
    """Memory on CPU that is kept for the next chunk and step: of a chunk's logits, and of some rows of them in fp32.

    The C library gives so large a block back at once and the kernel clears the next one page by page: 8 to 14 % of the
    time of the loss. GPUs need none of this: torch keeps their memory.
    """
    return torch.empty(tokens, words, dtype=dtype)


class OwnLoss(Protocol):
    """A loss that is computed from the logits of one chunk of tokens after the other.

    Attributes:
        reports: its number for each label is a result of `linear_cross_entropy`.
    """

    reports: ClassVar[bool]

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
        """Cross-entropy, logsumexp and its own number of each label into `found`.

        Args:
            part: the chunk's tokens among all.
            logits_CV: this rank's, in fp32, which it may overwrite.
            local_C: labels, counted from this rank's first row.

        Returns:
            With `train` the gradient [C, V/t] of these logits, the z-loss included.
        """
        ...

    def costs(self, options: LossOptions, ce_N: Tensor, lse_N: Tensor, own_N: Tensor) -> Tensor:
        """Of each label, without the z-loss, from the numbers that `chunk` found."""
        ...


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        weights_N: Tensor,
        loss: OwnLoss | None,
        first: int,
        axis: Axis,
        options: LossOptions,
        train: bool,
    ) -> tuple[Tensor, ...]:
        unit = weights_N.abs().amax().clamp(min=1e-30) if x_NH.dtype == torch.float16 else None
        unit_weights_N = weights_N if unit is None else weights_N / unit
        ce_N = torch.empty(x_NH.shape[0], dtype=wide_type(x_NH.dtype), device=x_NH.device)
        lse_N, own_N = torch.empty_like(ce_N), torch.empty_like(ce_N if loss is not None else ce_N[:0])
        step = options.chunk or max(1, x_NH.shape[0])
        grads = Gradients(x_NH, weight_VH, bias_V, -(-x_NH.shape[0] // step)) if train else None
        given = (labels_N, unit_weights_N, first, axis, options, ce_N, lse_N, grads)
        for begin in range(0, x_NH.shape[0], step):
            part = slice(begin, begin + step)
            if loss is not None:
                _own_chunk(part, x_NH, weight_VH, bias_V, loss, *given[:-1], own_N, grads)
            elif options.compiled and bias_V is None and weight_VH.shape[0] and not _passes()[0].failed:
                _compiled_chunk(part, x_NH, weight_VH, *given)
            else:
                _chunk(part, x_NH, weight_VH, bias_V, *given)
        costs_N = options.costs(ce_N, lse_N) if loss is None else loss.costs(options, ce_N, lse_N, own_N)
        total = (weights_N * (costs_N + options.z_loss * lse_N.square())).sum()
        if grads is not None:
            ctx.save_for_backward(*grads.tensors(), unit)
            ctx.dtype = weight_VH.dtype
        of_labels = (ce_N, own_N) if loss is not None and loss.reports else (ce_N,)
        ctx.mark_non_differentiable(*of_labels)
        return total, *of_labels

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        # Scaled where they are, for one of them is as large as the head. A second backward pass is an error of
        # autograd.
        *grads, unit = ctx.saved_tensors
        scale = grad_loss if unit is None else grad_loss * unit
        dx, dweight, dbias = (None if each is None else each.mul_(scale) for each in grads)
        of_head = (None if each is None else each.to(ctx.dtype) for each in (dweight, dbias))
        return dx, *of_head, *(None,) * 7


def _has_wide_products(tensor: Tensor) -> bool:
    """Whether products of 16 bits can be written in fp32 there; CPUs, ROCm and tensors without values cannot."""
    return tensor.device.type == "cuda" and torch.version.hip is None and not hasattr(tensor, "fake_mode")


class Gradients:
    """Accumulators of the gradients of the sum of losses.

    That of the weight is a sum over chunks in fp32. A single chunk's is in the weight's type at once, unless fp16 can
    not hold it yet.
    """

    def __init__(self, x_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, chunks: int):
        self.x = torch.empty_like(x_NH)
        self.dtype = weight_VH.dtype
        self.sum_dtype = self.dtype if chunks == 1 and self.dtype != torch.float16 else wide_type(self.dtype)
        self.weight: Tensor | None = None if chunks else torch.zeros_like(weight_VH)
        self.bias = None if bias_V is None else torch.zeros_like(bias_V, dtype=wide_type(bias_V.dtype))

    def add(self, part: slice, grad_CV: Tensor, x_CH: Tensor, weight_VH: Tensor) -> None:
        """What the gradient of a chunk's products gives."""
        torch.mm(grad_CV, weight_VH, out=self.x[part])
        narrow = self.sum_dtype != grad_CV.dtype
        if narrow and _has_wide_products(grad_CV):  # the product stays in fp32, and is added where it is made
            if self.weight is None:
                self.weight = torch.mm(grad_CV.T, x_CH, out_dtype=self.sum_dtype)
            else:
                torch.addmm(self.weight, grad_CV.T, x_CH, out_dtype=self.sum_dtype, out=self.weight)
        elif self.weight is None:
            self.weight = (grad_CV.T @ x_CH).to(self.sum_dtype)
        elif narrow:
            self.weight += grad_CV.T @ x_CH
        else:
            self.weight.addmm_(grad_CV.T, x_CH)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        assert self.weight is not None
        if self.dtype == torch.float16:  # they are not yet of their final size
            return self.x, self.weight, self.bias
        return self.x, self.weight.to(self.dtype), None if self.bias is None else self.bias.to(self.dtype)


def _logits(product_CV: Tensor, options: LossOptions) -> Tensor:
    logits_CV = at_least_fp32(product_CV) * options.multiplier
    return logits_CV if options.softcap is None else options.softcap * torch.tanh(logits_CV / options.softcap)


def _largest(product_CV: Tensor, local_C1: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """Of each token the largest logit, and that of its label."""
    logits_CV = _logits(product_CV, options)
    return logits_CV.amax(1), logits_CV.gather(1, local_C1).squeeze(1)


def _total(product_CV: Tensor, max_C: Tensor, options: LossOptions) -> Tensor:
    """Of each token the sum of exp(logit - max)."""
    return (_logits(product_CV, options) - max_C.unsqueeze(1)).exp().sum(1)


def _gradient(
    product_CV: Tensor, max_C: Tensor, scale_C: Tensor, local_C1: Tensor, own_C: Tensor, options: LossOptions
) -> Tensor:
    """The gradient of the product of hidden states and head, in its type: scale * exp(logit - max), less `own` at the
    label, through cap and multiplier."""
    logits_CV = _logits(product_CV, options)
    words_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
    grad_CV = (logits_CV - max_C.unsqueeze(1)).exp() * scale_C.unsqueeze(1)
    grad_CV = grad_CV - torch.where(words_V == local_C1, own_C.unsqueeze(1), 0.0)
    if options.softcap is not None:
        grad_CV = grad_CV * (1.0 - (logits_CV / options.softcap).square())
    return (grad_CV * options.multiplier).to(product_CV.dtype)


@lru_cache(maxsize=1)
def _passes() -> tuple[Fallback, Callable, Callable, Callable]:
    """The three passes over a chunk's logits, each one kernel: 8 bytes per logit in bf16 where single operations move
    about 50. Before them, whether the compiler has failed."""
    fallback = Fallback("the loss runs as single operations")
    functions = (_largest, _total, _gradient)
    largest, total, gradient = (fallback.of(torch.compile(each, dynamic=False), each) for each in functions)
    return fallback, largest, total, gradient


def _compiled_chunk(
    part: slice,
    x_NH: Tensor,
    weight_VH: Tensor,
    labels_N: Tensor,
    weights_N: Tensor,
    first: int,
    axis: Axis,
    options: LossOptions,
    ce_N: Tensor,
    lse_N: Tensor,
    grads: Gradients | None,
) -> None:
    """As `_chunk`, for a head without biases."""
    _, largest, total, gradient = _passes()
    x_CH, weights_C = x_NH[part], weights_N[part]
    product_CV = x_CH @ weight_VH.T
    local_C = labels_N[part] - first
    mine_C = (local_C >= 0) & (local_C < product_CV.shape[1])
    local_C1 = local_C.clamp(0, product_CV.shape[1] - 1).unsqueeze(1)
    max_C, target_C = largest(product_CV, local_C1, options)
    max_C = all_reduce(max_C, axis, dist.ReduceOp.MAX)
    target_C = target_C.masked_fill(~mine_C, 0.0)
    total_C, target_C = all_reduce(torch.stack([total(product_CV, max_C, options), target_C]), axis)
    lse_C = max_C + total_C.log()
    ce_N[part], lse_N[part] = lse_C - target_C, lse_C
    if grads is None:
        return
    of_ce, of_lse = options.slopes(ce_N[part], lse_C)
    scale_C = weights_C * (of_ce + of_lse + 2.0 * options.z_loss * lse_C) / total_C
    grad_CV = gradient(product_CV, max_C, scale_C, local_C1, weights_C * of_ce * mine_C, options)
    grads.add(part, grad_CV, x_CH, weight_VH)


def _chunk(
    part: slice,
    x_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    weights_N: Tensor,
    first: int,
    axis: Axis,
    options: LossOptions,
    ce_N: Tensor,
    lse_N: Tensor,
    grads: Gradients | None,
) -> None:
    """Loss of one chunk into ce_N and lse_N, and its gradients into `grads`.

    On CPU the logits are looked at some rows at a time. In 16 bits these alone exist in fp32; their gradients take the
    place of the product.
    """
    x_CH, (tokens, words) = x_NH[part], (x_NH[part].shape[0], weight_VH.shape[0])
    out = wide = None
    rows = tokens
    if x_CH.device.type == "cpu" and axis.size == 1:  # ranks that share a vocabulary meet once for a chunk
        rows = min(tokens, max(1, ROW_BYTES // max(1, 4 * words)))
    if x_CH.device.type == "cpu" and x_CH.dtype in (torch.float32, torch.bfloat16) and options.chunk:
        out = _chunk_memory(min(options.chunk, x_NH.shape[0]), words, x_CH.dtype)[:tokens]
        if x_CH.dtype == torch.bfloat16 and rows < tokens:
            wide = _chunk_memory(rows, words, torch.float32)
    product_CV = torch.matmul(x_CH, weight_VH.T, out=out)
    seen = min(rows, tokens) if hasattr(x_CH, "fake_mode") else tokens  # without values, some rows show all
    for begin in range(0, seen, rows):
        some = slice(begin, min(begin + rows, tokens))
        at = slice(part.start + some.start, part.start + some.stop)
        product_RV = product_CV[some]
        logits_RV = at_least_fp32(product_RV) if wide is None else wide[: some.stop - some.start].copy_(product_RV)
        logits_RV = _logits_of(logits_RV, bias_V, options)
        grad_RV = _rows(logits_RV, labels_N[at], weights_N[at], first, axis, options, ce_N[at], lse_N[at], grads)
        if grad_RV is not None and grad_RV is not product_RV:
            product_RV.copy_(grad_RV)
    if grads is not None:
        grads.add(part, product_CV, x_CH, weight_VH)


def _rows(
    logits_RV: Tensor,
    labels_R: Tensor,
    weights_R: Tensor,
    first: int,
    axis: Axis,
    options: LossOptions,
    ce_R: Tensor,
    lse_R: Tensor,
    grads: Gradients | None,
) -> Tensor | None:
    """Loss of some tokens into ce_R and lse_R, and the gradient of their product, in the memory of their logits."""
    local_R = labels_R - first
    mine_R = (local_R >= 0) & (local_R < logits_RV.shape[1])
    local_R1 = local_R.clamp(0, max(0, logits_RV.shape[1] - 1)).unsqueeze(1)

    max_R = all_reduce(logits_RV.amax(1), axis, dist.ReduceOp.MAX)
    target_R = logits_RV.gather(1, local_R1).squeeze(1).masked_fill(~mine_R, 0.0)
    slope_RV = None
    if options.softcap is not None and grads is not None:
        slope_RV = 1.0 - (logits_RV / options.softcap).square()
    exp_RV = exp_(logits_RV.sub_(max_R.unsqueeze(1)))
    total_R, target_R = all_reduce(torch.stack([exp_RV.sum(1), target_R]), axis)
    torch.add(max_R, total_R.log(), out=lse_R)
    torch.sub(lse_R, target_R, out=ce_R)
    if grads is None:
        return None

    of_ce, of_lse = options.slopes(ce_R, lse_R)
    scale_R = weights_R * (of_ce + of_lse + 2.0 * options.z_loss * lse_R) / total_R
    grad_RV = exp_RV.mul_(scale_R.unsqueeze(1))
    grad_RV.scatter_add_(1, local_R1, (-weights_R * of_ce * mine_R).unsqueeze(1))
    if slope_RV is not None:
        grad_RV.mul_(slope_RV)
    if grads.bias is not None:
        grads.bias += grad_RV.sum(0)
    return grad_RV if options.multiplier == 1.0 else grad_RV.mul_(options.multiplier)


def _own_chunk(
    part: slice,
    x_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    loss: OwnLoss,
    labels_N: Tensor,
    weights_N: Tensor,
    first: int,
    axis: Axis,
    options: LossOptions,
    ce_N: Tensor,
    lse_N: Tensor,
    own_N: Tensor,
    grads: Gradients | None,
) -> None:
    """As `_chunk`, of another loss."""
    x_CH, train, slope_CV = x_NH[part], grads is not None, None
    logits_CV = logits_of(x_CH, weight_VH, bias_V, options)
    if options.softcap is not None and train:
        slope_CV = 1.0 - (logits_CV / options.softcap).square()
    found = (ce_N[part], lse_N[part], own_N[part])
    grad_CV = loss.chunk(part, logits_CV, labels_N[part] - first, weights_N[part], axis, options, found, train)
    if grads is None or grad_CV is None:
        return
    if slope_CV is not None:
        grad_CV.mul_(slope_CV)
    if grads.bias is not None:
        grads.bias += grad_CV.sum(0)
    grads.add(part, grad_CV.mul_(options.multiplier).to(x_CH.dtype), x_CH, weight_VH)


def linear_cross_entropy(
    x_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    weights_N: Tensor,
    loss: OwnLoss | None = None,
    *,
    first: int = 0,
    axis: Axis = ALONE,
    options: LossOptions = LossOptions(),
) -> tuple[Tensor, ...]:
    """Weighted sum of token losses, and each token's cross-entropy.

    Args:
        x_NH: hidden states, equal on every rank of `axis`; their gradient is partial (enter a tensor region first).
        weight_VH: this rank's rows [V/t, H] of the head.
        bias_V: this rank's part of its bias, or None.
        labels_N: target ids of the whole vocabulary.
        weights_N: weight of each token in the sum.
        loss: computes the costs from the logits; None for the cross-entropy, or `options.cost`.
        first: id of this rank's first row.

    Returns:
        (loss, ce_N): a differentiable fp32 scalar, of costs with the z-loss, and detached cross-entropies in nats.
        Where `loss` reports, also its own numbers [N], detached.
    """
    weights_N = weights_N.to(wide_type(x_NH.dtype))
    train = torch.is_grad_enabled() and (x_NH.requires_grad or weight_VH.requires_grad)
    return _LinearCrossEntropy.apply(x_NH, weight_VH, bias_V, labels_N, weights_N, loss, first, axis, options, train)
