"""Losses of preference pairs, from log-probabilities of whole sequences.

DPO (Rafailov et al. 2023, arXiv 2305.18290), its conservative and robust forms (Mitchell 2023, Chowdhury et al. 2024,
arXiv 2403.00409), IPO (Azar et al. 2023, arXiv 2310.12036), SLiC's hinge (Zhao et al. 2023, arXiv 2305.10425), SimPO
(Meng et al. 2024, arXiv 2405.14734), ORPO (Hong et al. 2024, arXiv 2403.07691) and the term of RPO (Pang et al. 2024,
arXiv 2404.19733)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

from ..contract import Objective
from .options import OBJECTIVE, ORPO, PAIRS, REFERENCE, SEQUENCE

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.config import Config
    from megatron.parallel.layers.label_costs import Labels


CHOSEN = "chosen"  # a kind of labels


def _is_chosen(sequence: Tensor) -> Tensor:
    return (sequence >= 0) & (sequence.long() % PAIRS == 0)


class PreferencePairs(Objective):
    """Each label of a pair costs the pair's loss, so a pair counts by the sum of its labels' weights.

    With s the sum of log(policy / reference) over the labels of a sequence, Delta = s_chosen - s_rejected.
    With `average`, s is a mean over the labels of the sequence. z = beta * Delta - margin.

    | loss | of a pair |
    |---|---|
    | sigmoid | -(1 - label_smoothing) log sigmoid(z) - label_smoothing log sigmoid(-z) |
    | robust | (-(1 - label_smoothing) log sigmoid(z) + label_smoothing log sigmoid(-z)) / (1 - 2 label_smoothing) |
    | ipo | (Delta - 1 / (2 beta))^2 |
    | hinge | max(0, 1 - z) |
    | orpo | -beta log sigmoid(o), and sft_weight is 1 by default |

    o is the logarithm of the odds ratio of both answers, of probabilities exp(mean log-probability of a label).
    `sft_weight` is the factor of the mean cross-entropy of all labels of chosen answers in a step.

    Sequences 0 and 1 of a sample are the chosen and the rejected one of its first pair, 2 and 3 of the next."""

    reports = ("preference_accuracy", "preference_margin")

    def __init__(
        self,
        loss: str = "sigmoid",
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        margin: float = 0.0,
        average: bool = False,
        reference_free: bool = False,
        pairs: int = 1,
        sft_weight: float | None = None,
    ) -> None:
        self.loss, self.beta, self.label_smoothing, self.margin = loss, beta, label_smoothing, margin
        odds = loss == ORPO
        self.average, self.reference_free, self.sequences = average or odds, reference_free or odds, PAIRS * pairs
        self.sft_weight = float(odds) if sft_weight is None else sft_weight
        self.columns = (SEQUENCE,) if self.reference_free else (SEQUENCE, REFERENCE)

    @classmethod
    def build(cls, config: Config) -> Self:
        return cls(**OBJECTIVE.options_of(config))

    def counted(self, weights: Tensor, columns: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {CHOSEN: _is_chosen(columns[SEQUENCE]) & (weights != 0)} if self.sft_weight else {}

    def cost_of_labels(self, labels: Labels) -> Tensor:
        gained_BS = labels.log_p_BS
        if not self.reference_free:
            gained_BS = gained_BS - labels.columns[REFERENCE]
        gained_BK = labels.sum(gained_BS)
        if self.average:
            gained_BK = gained_BK / labels.lengths_BK.clamp(min=1)
        delta_BP = gained_BK[:, 0::PAIRS] - gained_BK[:, 1::PAIRS]
        labels.report(
            "preference_accuracy", labels.spread((delta_BP > 0).to(delta_BP.dtype).repeat_interleave(PAIRS, 1))
        )
        labels.report("preference_margin", labels.spread(self.beta * delta_BP.repeat_interleave(PAIRS, 1)))
        loss_BP = self.of_odds(gained_BK) if self.loss == ORPO else self.of_pairs(delta_BP)
        cost_BS = labels.spread(loss_BP.repeat_interleave(PAIRS, 1))
        if self.sft_weight:
            chosen_BS = _is_chosen(labels.columns[SEQUENCE])
            cost_BS = cost_BS - self.sft_weight * labels.mean(labels.log_p_BS.masked_fill(~chosen_BS, 0.0), CHOSEN)
        return cost_BS

    def of_odds(self, mean_BK: Tensor) -> Tensor:
        """The loss of each pair from the mean log-probability of a label of each sequence."""
        import torch
        from torch.nn.functional import logsigmoid

        mean_BK = mean_BK.clamp(max=-1e-7)  # a probability of 1 has no odds, and a sequence without labels has it
        near_BK = mean_BK > -0.6931471805599453  # each form of log(1 - exp(x)) where it is exact
        no_BK = torch.where(near_BK, (-torch.expm1(mean_BK)).log(), torch.log1p(-mean_BK.exp()))
        odds_BK = mean_BK - no_BK
        return -self.beta * logsigmoid(odds_BK[:, 0::PAIRS] - odds_BK[:, 1::PAIRS])

    def of_pairs(self, delta: Tensor) -> Tensor:
        """The loss of each pair from Delta."""
        from torch.nn.functional import logsigmoid

        z, share = self.beta * delta - self.margin, self.label_smoothing
        if self.loss == "ipo":
            return (delta - 1 / (2 * self.beta)).square()
        if self.loss == "hinge":
            return (1 - z).clamp(min=0)
        if self.loss == "robust":
            return (share * logsigmoid(-z) - (1 - share) * logsigmoid(z)) / (1 - 2 * share)
        return -(1 - share) * logsigmoid(z) - share * logsigmoid(-z)
