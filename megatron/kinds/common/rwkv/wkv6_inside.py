"""What tokens of one run see of each other in RWKV-5 and RWKV-6, distance by distance, and its gradient, written out.

Shapes: B samples, c runs of Q positions, h heads of N channels. With P_d the product of the d - 1 decays between a
token and
the one d before it, which cannot overflow:

    y_t = sum_d s_td v_{t-d}          s_td = sum_N r_t k_{t-d} P_d
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .runs import Runs


def inside_runs(r_BcQhN: Tensor, k_BcQhN: Tensor, v_BcQhN: Tensor, log_w_BcQhN: Tensor, runs: Runs) -> Tensor:
    """y [B, c, Q, h, N], of fp32 tensors; the decays may be the same for all samples (B = 1).

    Keeps for the gradient what it makes, Q / 2 numbers per channel and token: a function to call within `recomputed`.
    """
    if torch.is_grad_enabled():
        return _Inside.apply(r_BcQhN, k_BcQhN, v_BcQhN, log_w_BcQhN, runs)
    return _inside(r_BcQhN, k_BcQhN, v_BcQhN, log_w_BcQhN, runs)


def _inside(r: Tensor, k: Tensor, v: Tensor, log_w: Tensor, runs: Runs, keep: list[Tensor] | None = None) -> Tensor:
    """y; P_d and s_d of every distance are added to `keep`."""
    w, y, passed = log_w.exp(), torch.zeros_like(r), torch.ones_like(log_w)
    for distance in range(1, runs.run):
        passed = passed[:, :, 1:] if distance == 1 else passed[:, :, 1:] * w[:, :, 1 : 1 - distance]
        score = (r[:, :, distance:] * k[:, :, :-distance]).mul_(passed).sum(-1, keepdim=True)
        _hide(score, distance, runs)
        y[:, :, distance:].addcmul_(score, v[:, :, :-distance])
        if keep is not None:
            keep += passed, score
    return y


def _hide(score_BcQh1: Tensor, distance: int, runs: Runs) -> None:
    """0 where a token does not see the one `distance` before it: the rows are those of the tokens that have one."""
    if runs.starts is not None:
        score_BcQh1 *= runs.sees(distance)[:, :, distance:, None, None]


class _Inside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, r: Tensor, k: Tensor, v: Tensor, log_w: Tensor, runs: Runs) -> Tensor:
        made: list[Tensor] = []
        y, ctx.runs, ctx.rates = _inside(r, k, v, log_w, runs, made), runs, len(log_w)
        ctx.save_for_backward(r, k, v, *made)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_y: Tensor) -> tuple[Tensor | None, ...]:
        r, k, v, *made = ctx.saved_tensors
        of_r, of_k, of_v, of_log_w, of_log_passed = (torch.zeros_like(r) for _ in range(5))
        for distance in reversed(range(1, ctx.runs.run)):
            passed, score = made[2 * distance - 2 : 2 * distance]
            here, there = (
                (slice(None), slice(None), slice(distance, None)),
                (slice(None), slice(None), slice(-distance)),
            )
            of_score = (of_y[here] * v[there]).sum(-1, keepdim=True)
            _hide(of_score, distance, ctx.runs)
            of_v[there].addcmul_(of_y[here], score)
            part = passed * of_score
            of_r[here].addcmul_(part, k[there])
            part *= r[here]
            of_k[there] += part
            if distance > 1:  # a decay is in the products of all distances beyond it: no differences of large sums
                of_log_passed[here].addcmul_(part, k[there])
                of_log_w[:, :, 1 : 1 - distance] += of_log_passed[here]
        return of_r, of_k, of_v, of_log_w if ctx.rates == len(r) else of_log_w.sum(0, keepdim=True), None
