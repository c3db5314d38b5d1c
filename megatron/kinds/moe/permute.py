"""Tokens sorted by expert, and back. Without a capacity no size depends on the data, so the host never waits for the
device.

Shapes: T tokens, k experts per token, E experts, R rows (a row is one token at one expert), H hidden."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.kinds.common.recurrence.recomputed import recomputed
from megatron.parallel.layout.precision import at_least_fp32

from .router import ExpertChoice


@dataclass(frozen=True)
class Rows:
    """Rows sorted by expert."""

    source_R: Tensor  # int64, the token of each row
    ends_E: Tensor  # int32, ends of each expert's rows
    tokens: int  # T
    place_Tk: Tensor | None = None  # int64, the row of each token's choices. None where experts choose.
    kept_Tk: Tensor | None = None  # which choices have a row (capacity). None where all have.
    owner_T: Tensor | None = None  # int64, numbers by which tensor parallel ranks divide the tokens. None: in order.
    each: int | None = None  # number of rows of every expert. None where the data decides.

    @property
    def exact(self) -> bool:
        """Whether the rows are the choices in another order."""
        return self.place_Tk is not None and self.kept_Tk is None


def placed(sorted_R: Tensor, order_R: Tensor, experts: int, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """`source_R`, `place_Tk` and `ends_E` of `Rows`, from sorted numbers of experts and the choice of each row."""
    arange = torch.ops.aten.arange  # DeepSpeed replaces torch.arange under ZeRO 3 by one that cannot be compiled
    numbers_E = arange(experts, device=sorted_R.device, dtype=sorted_R.dtype)
    ends_E = torch.searchsorted(sorted_R, numbers_E, right=True, out_int32=True)
    rows_R = arange(len(order_R), device=order_R.device)
    place_R = torch.empty_like(order_R).scatter_(0, order_R, rows_R)
    return order_R // top_k, place_R.view(-1, top_k), ends_E


def sort_by_expert(
    choice: ExpertChoice,
    experts: int,
    tokens: int,
    capacity: int | None = None,
    placed: Callable[..., tuple[Tensor, ...]] = placed,
) -> Rows:
    """Rows of a choice. Within an expert in the order of the tokens.

    Args:
        tokens: T.
        capacity: rows that each expert has. Its later tokens get none. Rows without a token hold token 0, to be
        ignored.
    """
    if choice.tokens_EC is not None:
        count, device = choice.tokens_EC.shape[1], choice.tokens_EC.device
        ends_E = torch.arange(1, experts + 1, device=device, dtype=torch.int32) * count
        return Rows(choice.tokens_EC.flatten(), ends_E, tokens, each=count)
    # A GPU sorts numbers by their bits, a few of them at a time.
    chosen_R = choice.of_tokens.flatten().to(torch.int16 if experts < 2**15 else torch.int32)
    sorted_R, order_R = chosen_R.sort(stable=True)
    top_k = choice.of_tokens.shape[1]
    source_R, place_Tk, ends_E = placed(sorted_R, order_R, experts, top_k)
    if capacity is None:
        return Rows(source_R, ends_E, tokens, place_Tk)
    sorted_R, ends_E = sorted_R.long(), ends_E.long()
    rows_R, numbers_E = (torch.arange(size, device=order_R.device) for size in (len(order_R), experts))
    begin_E = torch.cat([ends_E.new_zeros(1), ends_E[:-1]])
    nth_R = rows_R - begin_E[sorted_R]
    kept_R = nth_R < capacity
    slot_R = torch.where(kept_R, sorted_R * capacity + nth_R, experts * capacity)  # the last slot is the dropped ones'
    source = torch.zeros(experts * capacity + 1, dtype=order_R.dtype, device=order_R.device)
    source = source.scatter_(0, slot_R, order_R // top_k)[:-1]
    place_R, kept = torch.empty_like(order_R), torch.empty_like(kept_R)
    place_R.scatter_(0, order_R, torch.where(kept_R, slot_R, 0))
    kept.scatter_(0, order_R, kept_R)
    ends_E = ((numbers_E + 1) * capacity).int()
    return Rows(source, ends_E, tokens, place_R.view(-1, top_k), kept.view(-1, top_k), each=capacity)


class _Spread(torch.autograd.Function):
    """[T, H] to the rows [R, H]. The gradient of a token is the sum over its rows, in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, source_R: Tensor, place_Tk: Tensor) -> Tensor:
        ctx.save_for_backward(place_Tk)
        return x_TH.index_select(0, source_R)

    @staticmethod
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor, None, None]:
        (place_Tk,) = ctx.saved_tensors
        grad_TkH = grad_RH.index_select(0, place_Tk.flatten()).unflatten(0, place_Tk.shape)
        return grad_TkH.sum(1), None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RH: Tensor, place_N: Tensor) -> Tensor:
        ctx.save_for_backward(place_N)
        ctx.rows = len(x_RH)
        return x_RH.index_select(0, place_N)

    @staticmethod
    def backward(ctx: Any, grad_NH: Tensor) -> tuple[Tensor, None]:
        (place_N,) = ctx.saved_tensors
        every = ctx.rows == len(place_N)  # has a gradient
        grad_RH = torch.empty_like(grad_NH) if every else grad_NH.new_zeros(ctx.rows, grad_NH.shape[1])
        return grad_RH.index_copy_(0, place_N, grad_NH), None


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_NH: Tensor, place_N: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(place_N)
        return y_NH.new_zeros(rows, y_NH.shape[1]).index_copy_(0, place_N, y_NH)

    @staticmethod
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor, None, None]:
        (place_N,) = ctx.saved_tensors
        return grad_RH.index_select(0, place_N), None, None


def take(x_RH: Tensor, place_N: Tensor) -> Tensor:
    """The rows at these places, none of them twice, [N, H]."""
    return _Take.apply(x_RH, place_N)


def put(y_NH: Tensor, place_N: Tensor, rows: int) -> Tensor:
    """Rows [rows, H] with these at their places, the others 0: the reverse of `take`."""
    return _Put.apply(y_NH, place_N, rows)


def spread(x_TH: Tensor, source_R: Tensor, place_Tk: Tensor) -> Tensor:
    """Tokens [T, H] to rows [R, H], where each choice has a row."""
    return _Spread.apply(x_TH, source_R, place_Tk)


def permute(x_TH: Tensor, rows: Rows, spread: Callable[..., Tensor] = spread) -> Tensor:
    """Tokens [T, H] to rows [R, H].

    Args:
        spread: the function of this name, or its compiled form.
    """
    if rows.exact:
        return spread(x_TH, rows.source_R, rows.place_Tk)
    return x_TH.index_select(0, rows.source_R)


def weighted_sum(y_TkH: Tensor, weights_Tk: Tensor) -> Tensor:
    """Weighted sum of each token's rows, [T, H]."""
    return (at_least_fp32(y_TkH) * weights_Tk.unsqueeze(-1)).sum(1).to(y_TkH.dtype)


def total(y_RH: Tensor, place_Tk: Tensor, weights_Tk: Tensor, exact: bool) -> Tensor:
    """Weighted sum of the rows at each token's places, [T, H].

    Args:
        exact: whether each row has one place.
    """
    places = place_Tk.flatten()
    y_PH = take(y_RH, places) if exact else y_RH.index_select(0, places)
    return recomputed(weighted_sum, y_PH.unflatten(0, place_Tk.shape), weights_Tk)


def combine(y_RH: Tensor, rows: Rows, weights: Tensor, total: Callable[..., Tensor] = total) -> Tensor:
    """Rows [R, H] to the weighted sums of each token's, [T, H].

    Args:
        weights: fp32 [T, k], or [R] where experts choose.
        total: the function of this name, or its compiled form.
    """
    if rows.place_Tk is None:
        weighted = recomputed(lambda y, w: (at_least_fp32(y) * w.unsqueeze(-1)).to(y.dtype), y_RH, weights)
        return y_RH.new_zeros(rows.tokens, y_RH.shape[1]).index_add(0, rows.source_R, weighted)
    weights = weights if rows.kept_Tk is None else weights * rows.kept_Tk
    return total(y_RH, rows.place_Tk, weights, rows.exact)
