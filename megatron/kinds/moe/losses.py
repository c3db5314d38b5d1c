"""Auxiliary losses on the router, in fp32.

The z-loss and the loss per sequence are means over tokens and over sequences: no cut of the batch changes them. The
balancing loss multiplies the load of a batch with its mean scores, so by its definition it depends on which tokens are
counted together: those of a micro-batch (of all data parallel ranks, with `over: ranks`).

Shapes: B samples, S positions, T = B S tokens, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.kinds.moe.options import AuxiliaryLossOptions
from megatron.parallel.collectives import all_reduce
from megatron.parallel.mesh import Axis

from .choice import ExpertChoice


def auxiliary_losses(
    logits_TE: Tensor, scores_TE: Tensor, counts_BE: Tensor, options: AuxiliaryLossOptions, data: Axis
) -> dict[str, Tensor]:
    """The losses that have a coefficient, without it.

    Args:
        logits_TE, scores_TE: of the experts, and of using none.
        counts_BE: how often each sample has chosen each expert, on all ranks that share its tokens. The means of scores
            are of this rank's tokens: those of such ranks are averaged where their losses are.
        data: the data parallel axis.
    """
    found: dict[str, Tensor] = {}
    samples, experts = counts_BE.shape
    counts_BE = counts_BE.to(scores_TE.dtype)
    if options.balance or options.sequence:
        scores_TE = scores_TE[:, :experts]
        share_BSE = (scores_TE / scores_TE.sum(-1, keepdim=True)).unflatten(0, (samples, -1))
    if options.balance:
        counts_E = counts_BE.sum(0)
        if options.over == "ranks":
            counts_E = all_reduce(counts_E, data)
        found["balance"] = experts * (counts_E / counts_E.sum().clamp(min=1) * share_BSE.mean((0, 1))).sum()
    if options.sequence:
        load_BE = counts_BE / counts_BE.sum(-1, keepdim=True).clamp(min=1)
        found["sequence"] = experts * (load_BE * share_BSE.mean(1)).sum(-1).mean()
    if options.z:
        found["z"] = logits_TE.logsumexp(-1).square().mean()
    return found


@torch.no_grad()
def count(choice: ExpertChoice, samples: int, experts: int) -> Tensor:
    """fp32 [B, E], how often each sample has chosen each expert; where experts choose, [1, E]."""
    if choice.tokens_EC is not None:
        taken = choice.tokens_EC.shape[1]
        return torch.full((1, experts), float(taken), dtype=torch.float32, device=choice.tokens_EC.device)
    chosen = choice.of_tokens.view(samples, -1)
    counts = torch.zeros(samples, experts, dtype=torch.float32, device=chosen.device)
    return counts.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.float32))  # of integers, so in any order
