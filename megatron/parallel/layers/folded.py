"""Products with matrices whose rows the ranks of a sequence share: tokens stay, rows go around.

One axis has both parts of the tokens and parts of the matrices (tensor and sequence parallelism folded into one, TSP).
Each rank stores one run of the rows of a matrix [N, M], multiplies its own tokens by it, and passes it on. While it
multiplies, the next run arrives. After n - 1 passes every token was multiplied by all rows. A rank never holds more
than three runs: its own, the one that it multiplies and the one that arrives. In the backward pass the runs go around
once more. The sum of each run's gradient, in fp32 at least, follows one rank behind, until it arrives at the rank that
stores the run.

With n ranks, each sends (n - 1) / n of N M numbers in the forward pass, and twice this number in the backward pass.

Shapes: T tokens of this rank, n ranks, N outputs, M inputs, R = N / n rows of a run."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..layout.mesh import Axis
from ..layout.precision import at_least_fp32, wide_type
from ..messages.account import here
from .collectives import swap


def _runs(own_RM: Tensor, axis: Axis) -> Iterator[tuple[slice, Tensor]]:
    """(rows of the whole, the run) of every rank, this rank's first. The next run arrives meanwhile."""
    held, rows = own_RM.contiguous(), own_RM.shape[0]
    for step in range(axis.size):
        coming, works = held, list[dist.Work]()
        if step < axis.size - 1:
            coming = torch.empty_like(held)
            works = swap(axis, [(1, held)], [(-1, coming)])
        first = (axis.rank - step) % axis.size * rows
        yield slice(first, first + rows), held
        for work in works:
            work.wait()
        held = coming


class _Sums:
    """Gradients of the runs, which follow them from rank to rank."""

    def __init__(self, axis: Axis):
        self.axis = axis
        self.own: Tensor | None = None  # this rank's term of its own run
        self.coming: Tensor | None = None  # sum of the ranks before, of the run that comes next
        self.works: list[dist.Work] = []

    def add(self, gradient_RM: Tensor) -> None:
        """Add this rank's term of the gradient of a run, in the order of `_runs`."""
        gradient_RM = at_least_fp32(gradient_RM)
        if self.own is None:
            self.own = gradient_RM
            return
        arrived = self._arrived()
        gradient_RM = (gradient_RM if arrived is None else arrived.add_(gradient_RM)).contiguous()
        self.coming = torch.empty_like(gradient_RM)
        self.works = swap(self.axis, [(1, gradient_RM)], [(-1, self.coming)])

    def total(self, dtype: torch.dtype) -> Tensor:
        """The gradient of this rank's own run."""
        arrived, own = self._arrived(), self.own
        assert own is not None
        return (own if arrived is None else arrived.add_(own)).to(dtype)

    def _arrived(self) -> Tensor | None:
        for work in self.works:
            work.wait()
        self.works = []
        return self.coming


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TM: Tensor, own_RM: Tensor, axis: Axis) -> Tensor:
        ctx.save_for_backward(x_TM, own_RM)
        ctx.axis, ctx.layer = axis, here()
        y_TN = x_TM.new_empty(x_TM.shape[0], own_RM.shape[0] * axis.size)
        for rows, run_RM in _runs(own_RM, axis):
            y_TN[:, rows] = x_TM @ run_RM.T
        return y_TN

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, Tensor, None]:
        x_TM, own_RM = ctx.saved_tensors
        dx_TM = torch.zeros_like(x_TM, dtype=wide_type(x_TM.dtype)) if ctx.needs_input_grad[0] else None
        sums = _Sums(ctx.axis)
        for rows, run_RM in _runs(own_RM, ctx.axis):
            part_TR = grad_TN[:, rows]
            if dx_TM is not None:
                dx_TM += part_TR @ run_RM
            sums.add(part_TR.T @ x_TM)
        return None if dx_TM is None else dx_TM.to(x_TM.dtype), sums.total(own_RM.dtype), None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_T: Tensor, own_RM: Tensor, axis: Axis) -> Tensor:
        ctx.save_for_backward(tokens_T)
        ctx.axis, ctx.layer, ctx.shape, ctx.dtype = axis, here(), own_RM.shape, own_RM.dtype
        x_TM = own_RM.new_full((tokens_T.shape[0], own_RM.shape[1]), float("nan"))  # of an id that no rank has
        for rows, run_RM in _runs(own_RM, axis):
            local_T, here_T = _local(tokens_T, rows)
            x_TM = torch.where(here_T.unsqueeze(1), F.embedding(local_T, run_RM), x_TM)
        return x_TM

    @staticmethod
    def backward(ctx: Any, grad_TM: Tensor) -> tuple[None, Tensor, None]:
        (tokens_T,) = ctx.saved_tensors
        axis, rows, sums = ctx.axis, ctx.shape[0], _Sums(ctx.axis)
        wide_TM = at_least_fp32(grad_TM)
        for step in range(axis.size):
            first = (axis.rank - step) % axis.size * rows
            local_T, here_T = _local(tokens_T, slice(first, first + rows))
            gradient_RM = wide_TM.new_zeros(ctx.shape)
            gradient_RM.index_add_(0, local_T, wide_TM * here_T.unsqueeze(1))
            sums.add(gradient_RM)
        return None, sums.total(ctx.dtype), None


def _local(tokens_T: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """The tokens' places in a run of rows, 0 where they are not in it, and whether they are in it."""
    here_T = (tokens_T >= rows.start) & (tokens_T < rows.stop)
    return (tokens_T - rows.start).masked_fill(~here_T, 0), here_T


def linear_of_rows(x: Tensor, own_RM: Tensor, bias_N: Tensor | None, axis: Axis) -> Tensor:
    """[..., M] to [..., N] with a matrix whose rows the ranks of the axis store in equal runs. All ranks call it
    together.

    Args:
        x: of this rank's own tokens.
        own_RM: this rank's run. Its gradient is the sum over the tokens of all ranks.
        bias_N: whole on every rank. Its gradient is only of this rank's tokens.
    """
    y = _Linear.apply(x.reshape(-1, x.shape[-1]), own_RM, axis).view(*x.shape[:-1], -1)
    return y if bias_N is None else y + bias_N


def embedding_of_rows(tokens: Tensor, own_RM: Tensor, axis: Axis) -> Tensor:
    """int [...] to the tokens' rows [..., M] of a table that ranks store as in `linear_of_rows`."""
    return _Embedding.apply(tokens.reshape(-1), own_RM, axis).view(*tokens.shape, -1)
