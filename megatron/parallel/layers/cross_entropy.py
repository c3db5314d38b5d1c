"""Head and cross-entropy in one: logits exist for one chunk of tokens at a time, over a vocabulary cut by rows.

With logits `l = cap(m * W x + b)`, `Z = logsumexp(l)`, `E = Z - l[label]`, the loss of a token with weight w is
    `w * (c(E, Z) + z * Z**2)`
where the cost c is E unless an objective has another. With c' its derivatives, the gradient with respect to l is
    w * ((c'_E + c'_Z + 2 z Z) softmax(l) - c'_E onehot(label)).
Both follow from the logits of the chunk, so the forward pass computes the gradients of x and W and keeps no logits.
Memory is one chunk of [chunk, V/t] instead of several [N, V/t] (fused linear cross-entropy, Hsu et al. 2024, "Liger
Kernel"). All numbers are fp32 at least, for every type of x and W.

The loss scale of fp16 training reaches the gradients only in the backward pass, after their products in fp16. The
forward pass of fp16 therefore divides the weights by the largest one, and the backward pass multiplies by it.

An `OwnLoss` computes another loss from the logits: a divergence from a teacher, or the cost of an objective that reads
logits (both in `objective_logits.py`).

Shapes: N tokens, H hidden, V vocabulary, t tensor parallel ranks, C tokens in a chunk."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..fallback import Fallback
from ..layout.mesh import ALONE, Axis
from ..layout.precision import at_least_fp32, exp_, use_large_pages, wide_type
from .collectives import all_reduce


@dataclass(frozen=True)
class LossOptions:
    """How the loss is computed.

    Attributes:
        multiplier, softcap: of the logits.
        z_loss: coefficient of the z-loss.
        chunk: tokens in a chunk. 0: all.
        compiled: torch.compile makes one kernel of each pass over the logits, on GPUs.
        cost: of each label, from (cross-entropy, logsumexp), [N] each. None: the cross-entropy.
    """

    multiplier: float = 1.0
    softcap: float | None = None
    z_loss: float = 0.0
    chunk: int = 1024
    compiled: bool = False
    cost: Callable[[Tensor, Tensor], Tensor] | None = None

    def costs(self, ce_N: Tensor, lse_N: Tensor) -> Tensor:
        """Cost of each label, without the z-loss.

        Raises:
            ValueError: the number of costs is not that of labels.
        """
        return ce_N if self.cost is None else one_per_label(self.cost(ce_N, lse_N), ce_N)

    def slopes(self, ce_N: Tensor, lse_N: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """Derivatives of each label's cost with respect to its cross-entropy and its logsumexp."""
        if self.cost is None:
            return 1.0, 0.0
        with torch.enable_grad():
            both = ce_N.detach().requires_grad_(), lse_N.detach().requires_grad_()
            found = torch.autograd.grad(self.costs(*both).sum(), both, allow_unused=True, materialize_grads=True)
        return found[0], found[1]


def one_per_label(costs: Tensor, labels: Tensor) -> Tensor:
    if costs.shape != labels.shape:
        raise ValueError(f"the objective's cost must have one value per label, {labels.numel()}: {costs.shape}")
    return costs


def logits_of(x_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, options: LossOptions) -> Tensor:
    """This rank's logits [N, V/t] in fp32."""
    return _logits(x_NH @ weight_VH.T, bias_V, options)


def _logits(product_CV: Tensor, bias_V: Tensor | None, options: LossOptions) -> Tensor:
    """Logits from the product of hidden states and head. They share its memory where no operation changes them."""
    logits = at_least_fp32(product_CV)
    if options.multiplier != 1.0:
        logits = logits * options.multiplier
    if bias_V is not None:
        logits = logits + at_least_fp32(bias_V)
    return logits if options.softcap is None else options.softcap * torch.tanh(logits / options.softcap)


def own_labels(local_C: Tensor, logits_CV: Tensor) -> tuple[Tensor, Tensor]:
    """(whether this rank has the label [C], the column of the label [C, 1]), of labels counted from its first row.

    Labels of other ranks have the nearest column."""
    words = logits_CV.shape[1]
    return (local_C >= 0) & (local_C < words), local_C.clamp(0, max(0, words - 1)).unsqueeze(1)


COLUMNS = 1024  # of bf16 logits that a CPU computes at once
ROW_BYTES = 2**22  # of fp32 logits that a CPU computes with at once, so that they stay in its cache


@lru_cache(maxsize=2)
def _chunk_memory(tokens: int, words: int, dtype: torch.dtype) -> Tensor:
    """Memory on CPU that is kept for the next chunk and step: of the logits of a chunk, and of some rows in fp32.

    The C library returns so large a block at once, and the kernel clears the next one page by page: 8 to 14 % of the
    time of the loss. On GPUs torch keeps the memory."""
    kept = torch.empty(tokens, words, dtype=dtype)
    use_large_pages([kept])
    return kept


@dataclass(frozen=True)
class LossChunk:
    """A chunk of C tokens, as an `OwnLoss` reads it.

    Attributes:
        part: the chunk's place among all tokens.
        logits_CV: logits of this rank in fp32. The loss may overwrite them.
        local_C: labels, counted from this rank's first row.
        ce_C, lse_C, own_C: the loss writes cross-entropy, logsumexp and its own number of each label here.
        train: whether the loss computes a gradient.
    """

    part: slice
    logits_CV: Tensor
    local_C: Tensor
    weights_C: Tensor
    axis: Axis
    options: LossOptions
    ce_C: Tensor
    lse_C: Tensor
    own_C: Tensor
    train: bool


class OwnLoss(Protocol):
    """A loss that is computed from the logits of one chunk of tokens at a time.

    Attributes:
        reports: its own number of each label is a result of `linear_cross_entropy`.
    """

    reports: ClassVar[bool]

    def chunk(self, chunk: LossChunk) -> Tensor | None:
        """Write the numbers of each label. With `train`, return the gradient of the logits, z-loss included."""
        ...

    def costs(self, options: LossOptions, ce_N: Tensor, lse_N: Tensor, own_N: Tensor) -> Tensor:
        """Cost of each label, without the z-loss, from the numbers that `chunk` wrote."""
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
        count, of_head = -(-x_NH.shape[0] // step), ctx.needs_input_grad[1]
        grads = Gradients(x_NH, weight_VH, bias_V, count, of_head) if train else None
        numbers = (ce_N, lse_N, own_N)
        chunks = _Chunks(x_NH, weight_VH, bias_V, labels_N - first, unit_weights_N, axis, options, *numbers, grads)
        for begin in range(0, x_NH.shape[0], step):
            part = slice(begin, begin + step)
            if loss is not None:
                chunks.own(part, loss)
            elif options.compiled and bias_V is None and weight_VH.shape[0] and not _passes()[0].failed:
                chunks.compiled(part)
            else:
                chunks.plain(part)
        costs_N = options.costs(ce_N, lse_N) if loss is None else loss.costs(options, *numbers)
        total = (weights_N * (costs_N + options.z_loss * lse_N.square())).sum()
        if grads is not None:
            ctx.save_for_backward(*grads.tensors(), unit)
            ctx.dtype = weight_VH.dtype
        of_labels = (ce_N, own_N) if loss is not None and loss.reports else (ce_N,)
        ctx.mark_non_differentiable(*of_labels)
        return total, *of_labels

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        # Scaled in place, for one of them is as large as the head. Autograd rejects a second backward pass.
        *grads, unit = ctx.saved_tensors
        scale = grad_loss if unit is None else grad_loss * unit
        one = scale.device.type == "cpu" and not hasattr(scale, "fake_mode") and scale.item() == 1.0  # the usual case
        dx, dweight, dbias = (each if each is None or one else each.mul_(scale) for each in grads)
        of_head = (None if each is None else each.to(ctx.dtype) for each in (dweight, dbias))
        return dx, *of_head, *(None,) * 7


class Gradients:
    """Accumulators of the gradients of the sum of losses.

    The weight's gradient is a sum over chunks in fp32. With a single chunk it has the type of the weight at once,
    except in fp16, which cannot hold it before it is scaled. A frozen head has none."""

    def __init__(self, x_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, chunks: int, of_head: bool = True):
        self.of_head = of_head
        self.x = torch.empty_like(x_NH)
        self.dtype = weight_VH.dtype
        self.sum_dtype = self.dtype if chunks == 1 and self.dtype != torch.float16 else wide_type(self.dtype)
        self.weight: Tensor | None = None if chunks else torch.zeros_like(weight_VH)
        self.bias = None if bias_V is None else torch.zeros_like(bias_V, dtype=wide_type(bias_V.dtype))

    def add(self, part: slice, grad_CV: Tensor, x_CH: Tensor, weight_VH: Tensor) -> None:
        """Add the gradient of a chunk's product of hidden states and head."""
        torch.mm(grad_CV, weight_VH, out=self.x[part])
        if not self.of_head:
            return
        narrow = self.sum_dtype != grad_CV.dtype
        # ROCm and tensors without values have no kernel that writes or adds products of 16-bit numbers in fp32.
        wide = grad_CV.device.type == "cuda" and torch.version.hip is None and not hasattr(grad_CV, "fake_mode")
        if narrow and wide:
            if self.weight is None:
                self.weight = torch.mm(grad_CV.T, x_CH, out_dtype=self.sum_dtype)
            else:
                torch.addmm(self.weight, grad_CV.T, x_CH, out_dtype=self.sum_dtype, out=self.weight)
        elif self.weight is None:
            product = grad_CV.new_empty(grad_CV.shape[1], x_CH.shape[1])
            use_large_pages([product])
            self.weight = torch.mm(grad_CV.T, x_CH, out=product).to(self.sum_dtype)
        elif narrow:
            self.weight += grad_CV.T @ x_CH
        else:
            self.weight.addmm_(grad_CV.T, x_CH)

    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if self.weight is None:
            return self.x, None, None
        if self.dtype == torch.float16:  # the backward pass scales them first
            return self.x, self.weight, self.bias
        return self.x, self.weight.to(self.dtype), None if self.bias is None else self.bias.to(self.dtype)


def _largest(product_CV: Tensor, local_C1: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """The largest logit of each token, and the logit of its label."""
    logits_CV = _logits(product_CV, None, options)
    return logits_CV.amax(1), logits_CV.gather(1, local_C1).squeeze(1)


def _total(product_CV: Tensor, max_C: Tensor, options: LossOptions) -> Tensor:
    """Sum of exp(logit - max) of each token."""
    return (_logits(product_CV, None, options) - max_C.unsqueeze(1)).exp().sum(1)


def _gradient(
    product_CV: Tensor, max_C: Tensor, scale_C: Tensor, local_C1: Tensor, own_C: Tensor, options: LossOptions
) -> Tensor:
    """Gradient of the product, in its type: scale * exp(logit - max), less `own` at the label, through cap and
    multiplier."""
    logits_CV = _logits(product_CV, None, options)
    words_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
    grad_CV = (logits_CV - max_C.unsqueeze(1)).exp() * scale_C.unsqueeze(1)
    grad_CV = grad_CV - torch.where(words_V == local_C1, own_C.unsqueeze(1), 0.0)
    if options.softcap is not None:
        grad_CV = grad_CV * _slope(logits_CV, options.softcap)
    return (grad_CV * options.multiplier).to(product_CV.dtype)


def _slope(logits: Tensor, softcap: float) -> Tensor:
    return 1.0 - (logits / softcap).square()


@lru_cache(maxsize=1)
def _passes() -> tuple[Fallback, Callable, Callable, Callable]:
    """(whether the compiler has failed, the three passes over a chunk's logits, each one kernel).

    They move 8 bytes per logit in bf16, where single operations move about 50."""
    fallback = Fallback("the loss runs as single operations")
    functions = (_largest, _total, _gradient)
    largest, total, gradient = (fallback.of(torch.compile(each, dynamic=False), each) for each in functions)
    return fallback, largest, total, gradient


@dataclass(frozen=True)
class _Chunks:
    """All tokens. Each method computes the loss of one chunk, into ce_N, lse_N and own_N, and adds its gradients."""

    x_NH: Tensor
    weight_VH: Tensor
    bias_V: Tensor | None
    local_N: Tensor  # labels, counted from this rank's first row
    weights_N: Tensor
    axis: Axis
    options: LossOptions
    ce_N: Tensor
    lse_N: Tensor
    own_N: Tensor
    grads: Gradients | None

    def compiled(self, part: slice) -> None:
        """By compiled passes. The head has no bias."""
        _, largest, total, gradient = _passes()
        x_CH, weights_C, options = self.x_NH[part], self.weights_N[part], self.options
        product_CV = x_CH @ self.weight_VH.T
        mine_C, local_C1 = own_labels(self.local_N[part], product_CV)
        max_C, target_C = largest(product_CV, local_C1, options)
        max_C = all_reduce(max_C, self.axis, dist.ReduceOp.MAX)
        target_C = target_C.masked_fill(~mine_C, 0.0)
        total_C, target_C = all_reduce(torch.stack([total(product_CV, max_C, options), target_C]), self.axis)
        lse_C = max_C + total_C.log()
        self.ce_N[part], self.lse_N[part] = lse_C - target_C, lse_C
        if self.grads is None:
            return
        of_ce, of_lse = options.slopes(self.ce_N[part], lse_C)
        scale_C = weights_C * (of_ce + of_lse + 2.0 * options.z_loss * lse_C) / total_C
        grad_CV = gradient(product_CV, max_C, scale_C, local_C1, weights_C * of_ce * mine_C, options)
        self.grads.add(part, grad_CV, x_CH, self.weight_VH)

    def plain(self, part: slice) -> None:
        """By single operations.

        A CPU computes with some rows of logits at a time. In 16 bits only these rows exist in fp32. Their gradients
        replace the product."""
        x_CH, words = self.x_NH[part], self.weight_VH.shape[0]
        tokens, on_cpu = x_CH.shape[0], x_CH.device.type == "cpu"
        out = wide = None
        rows = tokens
        if on_cpu and self.axis.size == 1:  # ranks that share a vocabulary exchange once per chunk
            rows = min(tokens, max(1, ROW_BYTES // max(1, 4 * words)))
        if on_cpu and x_CH.dtype in (torch.float32, torch.bfloat16) and self.options.chunk:
            out = _chunk_memory(min(self.options.chunk, self.x_NH.shape[0]), words, x_CH.dtype)[:tokens]
            if x_CH.dtype == torch.bfloat16 and rows < tokens:
                wide = _chunk_memory(rows, words, torch.float32)
        if out is None or x_CH.dtype == torch.float32:
            product_CV = torch.matmul(x_CH, self.weight_VH.T, out=out)
        else:  # oneDNN orders some columns of the transposed head for its kernels while the cache has them
            for begin in range(0, words, COLUMNS):
                columns = slice(begin, begin + COLUMNS)
                torch.mm(x_CH, self.weight_VH[columns].T, out=out[:, columns])
            product_CV = out
        end = min(rows, tokens) if hasattr(x_CH, "fake_mode") else tokens  # without values, some rows stand for all
        for begin in range(0, end, rows):
            some = slice(begin, min(begin + rows, tokens))
            product_RV = product_CV[some]
            logits_RV = product_RV if wide is None else wide[: some.stop - some.start].copy_(product_RV)
            logits_RV = _logits(logits_RV, self.bias_V, self.options)
            grad_RV = self._rows(slice(part.start + some.start, part.start + some.stop), logits_RV)
            if grad_RV is not None and grad_RV is not product_RV:
                product_RV.copy_(grad_RV)
        if self.grads is not None:
            self.grads.add(part, product_CV, x_CH, self.weight_VH)

    def _rows(self, at: slice, logits_RV: Tensor) -> Tensor | None:
        """Loss of some tokens, and the gradient of their product in the memory of their logits."""
        options, weights_R, ce_R, lse_R = self.options, self.weights_N[at], self.ce_N[at], self.lse_N[at]
        mine_R, local_R1 = own_labels(self.local_N[at], logits_RV)
        max_R = all_reduce(logits_RV.amax(1), self.axis, dist.ReduceOp.MAX)
        target_R = logits_RV.gather(1, local_R1).squeeze(1).masked_fill(~mine_R, 0.0)
        slope_RV = None
        if options.softcap is not None and self.grads is not None:
            slope_RV = _slope(logits_RV, options.softcap)
        exp_RV = exp_(logits_RV.sub_(max_R.unsqueeze(1)))
        total_R, target_R = all_reduce(torch.stack([exp_RV.sum(1), target_R]), self.axis)
        torch.add(max_R, total_R.log(), out=lse_R)
        torch.sub(lse_R, target_R, out=ce_R)
        if self.grads is None:
            return None

        of_ce, of_lse = options.slopes(ce_R, lse_R)
        scale_R = weights_R * (of_ce + of_lse + 2.0 * options.z_loss * lse_R) / total_R
        grad_RV = exp_RV.mul_(scale_R.unsqueeze(1))
        grad_RV.scatter_add_(1, local_R1, (-weights_R * of_ce * mine_R).unsqueeze(1))
        self._through_cap_and_bias(grad_RV, slope_RV)
        return grad_RV if options.multiplier == 1.0 else grad_RV.mul_(options.multiplier)

    def own(self, part: slice, loss: OwnLoss) -> None:
        """By another loss."""
        x_CH, options, train, slope_CV = self.x_NH[part], self.options, self.grads is not None, None
        logits_CV = logits_of(x_CH, self.weight_VH, self.bias_V, options)
        if options.softcap is not None and train:
            slope_CV = _slope(logits_CV, options.softcap)
        given = (part, logits_CV, self.local_N[part], self.weights_N[part], self.axis, options)
        grad_CV = loss.chunk(LossChunk(*given, self.ce_N[part], self.lse_N[part], self.own_N[part], train))
        if self.grads is None or grad_CV is None:
            return
        self._through_cap_and_bias(grad_CV, slope_CV)
        self.grads.add(part, grad_CV.mul_(options.multiplier).to(x_CH.dtype), x_CH, self.weight_VH)

    def _through_cap_and_bias(self, grad_CV: Tensor, slope_CV: Tensor | None) -> None:
        if slope_CV is not None:
            grad_CV.mul_(slope_CV)
        if self.grads is not None and self.grads.bias is not None:
            self.grads.bias += grad_CV.sum(0)


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
        x_NH: hidden states, equal on every rank of `axis`. Their gradient is partial (enter a tensor region first).
        weight_VH: this rank's rows [V/t, H] of the head.
        bias_V: this rank's part of the bias, or None.
        labels_N: target ids of the whole vocabulary.
        weights_N: weight of each token in the sum.
        loss: computes the costs from the logits. None: the cross-entropy, or `options.cost`.
        first: id of this rank's first row.

    Returns:
        (loss, ce_N): a differentiable fp32 scalar, of costs with the z-loss, and detached cross-entropies in nats.
        Where `loss` reports, also its own numbers [N], detached.
    """
    weights_N = weights_N.to(wide_type(x_NH.dtype))
    train = torch.is_grad_enabled() and (x_NH.requires_grad or weight_VH.requires_grad)
    return _LinearCrossEntropy.apply(x_NH, weight_VH, bias_V, labels_N, weights_N, loss, first, axis, options, train)
