"""Label smoothing (Szegedy et al. 2015, arXiv 1512.00567) and the confidence penalty (Pereyra et al. 2017, arXiv
1701.06548)."""

from __future__ import annotations

from torch import Tensor

from megatron.config import Config
from megatron.objectives.contract import Objective
from megatron.parallel.layers.objective_logits import ChunkLogits

from .options import OBJECTIVE


class Smoothing(Objective):
    """A label costs -sum of q log p - entropy * H(p).

    p is what the model predicts. q gives each id of the vocabulary `share` / V, and the rest to the label.
    """

    def __init__(self, share: float, entropy: float) -> None:
        self.share, self.entropy = share, entropy

    @classmethod
    def build(cls, config: Config) -> Smoothing:
        return cls(**OBJECTIVE.options_of(config))

    def cost_of_logits(self, logits: ChunkLogits) -> Tensor:
        mean_C = logits.sum(logits.own_CV) / logits.vocabulary
        cost_C = logits.ce_C + self.share * (logits.lse_C - logits.ce_C - mean_C)
        if self.entropy:
            log_p_CV = logits.log_p_CV
            cost_C = cost_C + self.entropy * logits.sum(log_p_CV.exp() * log_p_CV)
        return cost_C
