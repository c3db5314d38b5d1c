"""Auxiliary losses on the router, in fp32, and its balance without a loss.

The z-loss and the loss per sequence are means over tokens and over sequences: no cut of the batch changes them. The
balancing loss multiplies the load of a batch with its mean scores, so its definition depends on the counted tokens.
These are a micro-batch (of all data parallel ranks, with `over: ranks`).

Shapes: B samples, S positions, T = B S tokens, E experts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.kinds.moe.options import AuxiliaryLossOptions, MoEOptions
from megatron.model.expert_tally import LOSSES, ExpertTally
from megatron.parallel.layers.collectives import all_reduce
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.mesh import ALONE, Axis
from megatron.parallel.layout.shard import Role

from .router import ExpertChoice, classes


class Balance(ExpertTally):
    """Tallies of one layer's routed tokens since the last update, and the correction that evens the load.

    Checkpoints have the correction, which is no parameter. Counts are of this rank's tokens. The engine sums them over
    data parallel ranks (tensor parallel ranks have equal counts) and calls `finish` with the same sums on every rank.
    """

    def __init__(self, make: ParameterFactory, options: MoEOptions):
        super().__init__()
        self.layer = next((int(word) for word in make.prefix.split(".") if word.isdigit()), 0)
        self.experts, self.options = options.experts, options.router
        self.correction: Tensor | None = None
        if options.router.correction != "none":
            self.correction = make.buffer("correction", (classes(options),), role=Role.ROUTER)
            self.correction[options.experts :] = -1.0
        self.tally = torch.zeros(options.experts + self.EXTRA, dtype=torch.float32, device=make.device)
        self.zero_and_one = torch.arange(2, dtype=torch.float32, device=make.device).split(1)

    @torch.no_grad()
    def numbers(self, counts_E: Tensor, dropped: Tensor | None, losses: dict[str, Tensor]) -> Tensor:
        """One micro-batch, as a tally.

        Args:
            counts_E: number of choices of each expert.
            dropped: number of choices without a place, or of no expert.
        """
        none, one = self.zero_and_one
        numbers = [none if dropped is None else dropped.view(1), *(losses.get(name, none).view(1) for name in LOSSES)]
        return torch.cat([counts_E, *numbers, one])

    @torch.no_grad()
    def add(self, numbers: Tensor) -> None:
        self.tally += numbers

    @torch.no_grad()
    def finish(self, counts_E: Tensor) -> None:
        """Move the correction by the choices of the step's whole batch (Wang et al. 2024, "Auxiliary-loss-free")."""
        if self.correction is not None:
            excess_E = counts_E.double() * self.experts - counts_E.double().sum()
            self.correction[: self.experts] -= self.options.correction_rate * torch.sign(excess_E).float()


@dataclass
class Routed:
    """Sums for the losses over the tokens of all chunks so far."""

    counts_BE: Tensor | None = None  # choices of each class by each sample, the experts first and then none
    dropped: Tensor | None = None  # choices without a place, or of no expert. None where each has a place
    tokens: int = 0  # of a sample
    share_BE: Tensor | None = None  # each expert's share of a token's scores
    z_B: Tensor | None = None  # the squared logsumexp of the logits

    def add(
        self, tokens: int, counts_BE: Tensor, dropped: Tensor | None, share_BE: Tensor | None, z_B: Tensor | None
    ) -> None:
        """Add tokens of the same samples."""
        self.tokens += tokens
        self.counts_BE, self.dropped = _plus(self.counts_BE, counts_BE), _plus(self.dropped, dropped)
        self.share_BE, self.z_B = _plus(self.share_BE, share_BE), _plus(self.z_B, z_B)


def _plus(before: Tensor | None, more: Tensor | None) -> Tensor | None:
    return more if before is None or more is None else before + more


def sums_of_samples(
    logits_TE: Tensor, scores_TE: Tensor, samples: int, options: MoEOptions
) -> tuple[Tensor | None, Tensor | None]:
    """`share_BE` and `z_B` of `Routed`, for some tokens of each sample. Logits and scores are of all classes."""
    losses, share_BE, z_B = options.losses, None, None
    if losses.balance or losses.sequence:
        own_TE = scores_TE[:, : options.experts]
        share_TE = own_TE / own_TE.sum(-1, keepdim=True)
        share_BE = share_TE.unflatten(0, (samples, -1)).sum(1)
    if losses.z:
        z_B = logits_TE.logsumexp(-1).square().view(samples, -1).sum(1)
    return share_BE, z_B


def auxiliary_losses(
    share_BE: Tensor | None,
    z_B: Tensor | None,
    counts_BE: Tensor,
    tokens: int,
    options: AuxiliaryLossOptions,
    data: Axis = ALONE,
) -> dict[str, Tensor]:
    """The losses that have a coefficient, without it.

    Args:
        share_BE, z_B: of `Routed`.
        counts_BE: choices of each expert by each sample, on all ranks that share its tokens. The means of scores are of
            this rank's tokens, and the losses of such ranks are averaged later.
        tokens: of a sample.
        data: the data parallel axis, over which `over: ranks` adds counts.
    """
    found: dict[str, Tensor] = {}
    experts = counts_BE.shape[1]
    if share_BE is not None:
        counts_BE, share_BE = counts_BE.to(share_BE.dtype), share_BE / tokens
        if options.balance:
            counts_E = counts_BE.sum(0)
            if options.over == "ranks":
                counts_E = all_reduce(counts_E, data)
            found["balance"] = experts * (counts_E / counts_E.sum().clamp(min=1) * share_BE.mean(0)).sum()
        if options.sequence:
            load_BE = counts_BE / counts_BE.sum(-1, keepdim=True).clamp(min=1)
            found["sequence"] = experts * (load_BE * share_BE).sum(-1).mean()
    if z_B is not None:
        found["z"] = z_B.mean() / tokens
    return found


@torch.no_grad()
def count(choice: ExpertChoice, samples: int, experts: int) -> Tensor:
    """fp32 [B, E], number of choices of each expert by each sample. Where experts choose, [1, E]."""
    if choice.tokens_EC is not None:
        taken = choice.tokens_EC.shape[1]
        return choice.tokens_EC.new_full((1, experts), float(taken), dtype=torch.float32)
    chosen = choice.of_tokens.view(samples, -1)
    counts = chosen.new_zeros(samples, experts, dtype=torch.float32)  # DeepSpeed replaces torch.zeros under ZeRO 3
    return counts.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.float32))  # of integers, so in any order
