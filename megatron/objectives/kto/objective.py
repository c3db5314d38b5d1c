"""KTO (Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization", arXiv 2402.01306)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

from ..contract import Objective
from .options import OBJECTIVE

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.config import Config
    from megatron.parallel.layers.label_costs import Labels

KL, REWARD = "kl", "reward"  # a number of the whole batch, and a column


class KTO(Objective):
    """Each label of an answer costs the answer's loss, so an answer counts by the sum of its labels' weights.

    The sum s of an answer is that of log(policy / reference) over its labels. The mean k of this sum over the
    mismatched answers of the global batch is at least 0 and has no gradient.

    An answer with a reward above 0 costs desirable_weight (1 - sigmoid(beta (s - k))). Another one costs
    undesirable_weight (1 - sigmoid(beta (k - s))).

    With `kl` false, k is 0. This is APO-zero for answers without pairs (D'Oosterlinck et al. 2024, arXiv 2408.06266).
    """

    sequences = 1
    columns = ("sequence", "reference", REWARD)
    columns_of_probes = ("sequence", "reference")
    reports = ("preference_accuracy", "preference_margin", "reference_kl")

    def __init__(
        self, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0, kl: bool = True
    ) -> None:
        self.beta, self.factors, self.probes = beta, (desirable_weight, undesirable_weight), kl

    @classmethod
    def build(cls, config: Config) -> Self:
        return cls(**OBJECTIVE.options_of(config))

    def of_probes(self, labels: Labels) -> Mapping[str, Tensor]:
        return {KL: labels.sum(labels.log_p_BS - labels.columns["reference"])[:, 0]}

    def cost_of_labels(self, labels: Labels) -> Tensor:
        import torch

        gained_BS = labels.spread(labels.sum(labels.log_p_BS - labels.columns["reference"]))
        good_BS = labels.columns[REWARD] > 0
        known = labels.known[KL] if self.probes else 0.0
        kl = torch.as_tensor(known, dtype=gained_BS.dtype, device=gained_BS.device).clamp(min=0)
        z_BS = (self.beta * (gained_BS - kl)).where(good_BS, self.beta * (kl - gained_BS))
        one = torch.ones_like(z_BS)
        labels.report("preference_accuracy", (z_BS > 0).to(z_BS.dtype))
        labels.report("preference_margin", (self.beta * gained_BS).where(good_BS, -self.beta * gained_BS))
        labels.report("reference_kl", kl * one)
        return (self.factors[0] * one).where(good_BS, self.factors[1] * one) * (1 - z_BS.sigmoid())
