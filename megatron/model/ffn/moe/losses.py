"""Auxiliary losses on the router, in fp32.

The z-loss and the loss per sequence are means over tokens and over sequences: no cut of the batch changes them. The
balancing loss multiplies the load of a batch with its mean scores, so by its definition it depends on which tokens are
counted together: those of a micro-batch (of all data parallel ranks, with `over: ranks`).

Shapes: B samples, S positions, T = B S tokens, E experts, k experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.config.sections.moe import AuxiliaryLossOptions
from megatron.parallel.collectives import all_reduce
from megatron.parallel.mesh import Axis


def auxiliary_losses(
    logits_TE: Tensor, scores_TE: Tensor, experts_Tk: Tensor, samples: int, options: AuxiliaryLossOptions, data: Axis
) -> dict[str, Tensor]:
    """The losses that have a coefficient, without it.

    Args:
        samples: B.
        data: the data parallel axis.
    """
    found: dict[str, Tensor] = {}
    experts = logits_TE.shape[1]
    if options.balance or options.sequence:
        share_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
    if options.balance:
        load_E = loads(experts_Tk.unsqueeze(0), experts)[0]
        if options.over == "ranks":
            load_E = all_reduce(load_E, data) / data.size
        found["balance"] = experts * (load_E * share_TE.mean(0)).sum()
    if options.sequence:
        load_BE = loads(experts_Tk.view(samples, -1, experts_Tk.shape[1]), experts)
        found["sequence"] = experts * (load_BE * share_TE.view(samples, -1, experts).mean(1)).sum(-1).mean()
    if options.z:
        found["z"] = logits_TE.logsumexp(-1).square().mean()
    return found


@torch.no_grad()
def loads(experts_BTk: Tensor, experts: int) -> Tensor:
    """[B, E], the share of each expert in the choices of each row of the first dimension; fp32."""
    flat = experts_BTk.flatten(1)
    counts = torch.zeros(len(flat), experts, dtype=torch.float32, device=flat.device)
    return counts.scatter_add_(1, flat, torch.ones_like(flat, dtype=torch.float32)) / flat.shape[1]
