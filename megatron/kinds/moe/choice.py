"""Which experts a token uses, and with which weights. Everything here is fp32. Nothing that chooses has a gradient.

Shapes: T tokens, E experts, k experts per token, C tokens per expert.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.kinds.moe.options import MoEOptions, RouterOptions

TINY = 1e-20


@dataclass(frozen=True)
class ExpertChoice:
    """The experts of tokens, or the tokens of experts. Recomputation of activations uses the same choice.

    Attributes:
        experts_Tk: int64, the experts of each token. None where experts choose.
        tokens_EC: int64, the tokens of each expert. None where tokens choose.
    """

    experts_Tk: Tensor | None = None
    tokens_EC: Tensor | None = None

    @property
    def of_tokens(self) -> Tensor:
        """`experts_Tk`. ValueError where experts choose."""
        if self.experts_Tk is None:
            raise ValueError("experts choose, so tokens have no list of theirs")
        return self.experts_Tk

    @property
    def of_experts(self) -> Tensor:
        """`tokens_EC`. ValueError where tokens choose."""
        if self.tokens_EC is None:
            raise ValueError("tokens choose, so experts have no list of theirs")
        return self.tokens_EC


def scores_of(logits_TE: Tensor, score: str) -> Tensor:
    return logits_TE.softmax(-1) if score == "softmax" else logits_TE.sigmoid()


@torch.no_grad()
def choose_experts(
    logits_TE: Tensor, scores_TE: Tensor, correction_E: Tensor | None, options: MoEOptions, training: bool
) -> ExpertChoice:
    """The choice of `options.router.select`.

    Args:
        logits_TE: of the router.
        scores_TE: `scores_of` them.
        correction_E: added to the scores here and nowhere else.
    """
    router = options.router
    if router.select == "expert_choice":
        count = max(1, logits_TE.shape[0] * options.top_k // options.experts)
        return ExpertChoice(tokens_EC=scores_TE.topk(min(count, logits_TE.shape[0]), dim=0).indices.T.contiguous())
    if router.select == "sinkhorn" and training:
        return ExpertChoice(sinkhorn(logits_TE, router).topk(options.top_k, dim=-1).indices)
    wanted_TE = scores_TE if correction_E is None else scores_TE + correction_E
    if router.top_groups < router.groups:
        wanted_TE = _within_groups(wanted_TE, router)
    return ExpertChoice(wanted_TE.topk(options.top_k, dim=-1).indices)


def weights_of(scores_TE: Tensor, experts_Tk: Tensor, options: MoEOptions) -> Tensor:
    """The weights [T, k] of the chosen experts' outputs, from their uncorrected scores. 0 where no expert is used."""
    router, scores_Tk = options.router, scores_TE.gather(1, experts_Tk)
    if router.normalize:
        scores_Tk = scores_Tk / (scores_Tk.sum(-1, keepdim=True) + TINY)
    if router.skip:
        scores_Tk = scores_Tk.masked_fill(experts_Tk == options.experts, 0.0)
    return scores_Tk if router.scale == 1.0 else scores_Tk * router.scale


def classes(options: MoEOptions) -> int:
    """Number of choices of a router: the experts, and to use none."""
    return options.experts + options.router.skip


def replace_none(choice: ExpertChoice, options: MoEOptions) -> ExpertChoice:
    """The choice with an expert in place of none (in turn, to be even): such a token's weight is 0."""
    if not options.router.skip:
        return choice
    experts_Tk = choice.of_tokens
    turns = torch.arange(len(experts_Tk), device=experts_Tk.device).unsqueeze(1) % options.experts
    return ExpertChoice(torch.where(experts_Tk == options.experts, turns, experts_Tk))


def _within_groups(wanted_TE: Tensor, router: RouterOptions) -> Tensor:
    """-inf outside of each token's best groups."""
    by_group = wanted_TE.unflatten(-1, (router.groups, -1))
    counted = min(2 if router.group_score == "top_two" else 1, by_group.shape[-1])
    best = by_group.topk(counted, dim=-1).values.sum(-1).topk(router.top_groups, dim=-1).indices
    outside = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter_(-1, best, False)
    return by_group.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(-2)


def sinkhorn(logits_TE: Tensor, router: RouterOptions) -> Tensor:
    """Logarithms of exp(logits) with rows scaled to sums of 1/T and columns to sums of about 1/E: the order within a
    row is balanced.

    The number of rounds is fixed: the published tolerance compares numbers of the size of 1/T with 1e-4, and stops
    after the first round. Logarithms avoid overflow of exponentials in fp32.
    """
    tokens, experts = (math.log(size) for size in logits_TE.shape)
    column_E = torch.zeros_like(logits_TE[0]) if router.sinkhorn_start == "ones" else -logits_TE.logsumexp(0) - experts
    for _ in range(router.sinkhorn_iterations):
        row_T = -(logits_TE + column_E).logsumexp(1) - tokens
        column_E = -(logits_TE + row_T.unsqueeze(1)).logsumexp(0) - experts
    return logits_TE + row_T.unsqueeze(1) + column_E
