"""Losses of preference pairs, from log-probabilities of whole sequences.

DPO (Rafailov et al. 2023, arXiv 2305.18290), its conservative and robust forms (Mitchell 2023, Chowdhury et al. 2024,
arXiv 2403.00409), IPO (Azar et al. 2023, arXiv 2310.12036), SLiC's hinge (Zhao et al. 2023, arXiv 2305.10425) and SimPO
(Meng et al. 2024, arXiv 2405.14734).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from ..contract import Objective
from .options import OBJECTIVE, PAIRS, REFERENCE, SEQUENCE

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.config import Config
    from megatron.parallel.layers.label_costs import Labels


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

    Sequences 0 and 1 of a sample are the chosen and the rejected one of its first pair, 2 and 3 of the next.
    """

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
    ) -> None:
        self.loss, self.beta, self.label_smoothing, self.margin = loss, beta, label_smoothing, margin
        self.average, self.reference_free, self.sequences = average, reference_free, 2 * pairs
        self.columns = (SEQUENCE,) if reference_free else (SEQUENCE, REFERENCE)

    @classmethod
    def build(cls, config: Config) -> Self:
        return cls(**OBJECTIVE.options_of(config))

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
        return labels.spread(self.of_pairs(delta_BP).repeat_interleave(PAIRS, 1))

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
