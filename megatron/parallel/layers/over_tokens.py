"""Vectors that broadcast over the tokens of compiled parts. Their gradients take few kernels of a GPU.

Shapes: B samples, S positions, H channels, G groups of tokens, m rows.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layout.precision import at_least_fp32

GROUP = 128  # tokens


class _OverTokens(torch.autograd.Function):
    """Vectors, and the rows of one matrix before them, as [B, S, H] each, in fp32."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        # With `B, S, *given` in the signature, torch 2.13's compiler omits ctx if nothing needs a gradient and a call
        # has the signature's number of parameters, each with a star counted once.
        B, S, *given = inputs
        ctx.rows, ctx.types = len(given[0]) if given[0].dim() == 2 else 0, [each.dtype for each in given]
        rows = [*given[0], *given[1:]] if ctx.rows else given
        return tuple(at_least_fp32(each).expand(B, S, -1).contiguous() for each in rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found, types = [], ctx.types
        if ctx.rows:
            found, types = [_sums(gradients[: ctx.rows], True).to(types[0])], types[1:]
        if types:
            sums = _sums(gradients[ctx.rows :], len(types) < 3)
            found += [sums.to(each)[row] for row, each in enumerate(types)]
        return None, None, *found


def _sums(gradients: Sequence[Tensor], joined: bool) -> Tensor:
    """Sums of [B, S, H] each over tokens, [m, H]: first over groups of tokens, which are then summed in one kernel.

    Args:
        joined: the tensors are products with the same tensors, so that inductor joins their first sums. Others are rows
            of one sum of tensors with 0 elsewhere. This is one kernel, which reads each tensor once.
    """
    grouped, last = [each.reshape(1, -1, GROUP, each.shape[-1]) for each in gradients], len(gradients) - 1
    if joined:
        return torch.cat([each.sum(2) for each in grouped]).sum(1)
    rows = [F.pad(each, (0, 0, 0, 0, 0, 0, row, last - row)) for row, each in enumerate(grouped)]
    return sum(rows[1:], rows[0]).sum(2).sum(1)


def over_tokens(given: Sequence[Tensor], x_BSH: Tensor) -> list[Tensor]:
    """Vectors, and the rows of a matrix before them, to broadcast over tokens. They may already be [B, S, H].

    In a compiled part their gradients are sums over groups of tokens, which one kernel adds for all vectors. Inductor
    would do the same with one kernel for each.
    """
    B, S, _ = x_BSH.shape
    if not torch.compiler.is_compiling() or B * S % GROUP or given[0].dim() == 3:
        return [*given[0], *given[1:]] if given[0].dim() == 2 else list(given)
    return list(_OverTokens.apply(B, S, *given))
