"""Reward models by Bradley and Terry (1952): Ouyang et al. 2022, arXiv 2203.02155. Margins as Llama 2 has them (Touvron
et al. 2023, arXiv 2307.09288), centring as Eisenstein et al. 2023, arXiv 2312.09244."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from ..contract import Objective
from .options import OBJECTIVE

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.config import Config
    from megatron.parallel.layers.label_costs import Labels


class RewardModel(Objective):
    """A pair with the values c of the chosen and r of the rejected answer costs

    -log sigmoid(c - r - margin) + centre (c + r)^2 + squares (c^2 + r^2)
    """

    scores = True
    sequences = 2
    reports = ("preference_accuracy", "preference_margin", "mean_reward")

    def __init__(self, margins: bool = False, centre: float = 0.0, squares: float = 0.0) -> None:
        self.centre, self.squares = centre, squares
        self.columns = ("sequence", "margin") if margins else ("sequence",)

    @classmethod
    def build(cls, config: Config) -> Self:
        return cls(**OBJECTIVE.options_of(config))

    def cost_of_labels(self, labels: Labels) -> Tensor:
        from torch.nn.functional import logsigmoid

        values_B2 = labels.sum(labels.log_p_BS)  # one value in a sequence
        chosen_B1, rejected_B1 = values_B2.split(1, 1)
        z_B1 = chosen_B1 - rejected_B1
        if (margin_BS := labels.columns.get("margin")) is not None:
            z_B1 = z_B1 - labels.sum(margin_BS.to(z_B1.dtype))[:, :1]
        cost_B1 = -logsigmoid(z_B1) + self.centre * (chosen_B1 + rejected_B1).square()
        cost_B1 = cost_B1 + self.squares * values_B2.square().sum(1, keepdim=True)
        better_B1 = (chosen_B1 > rejected_B1).to(z_B1.dtype)
        labels.report("preference_accuracy", labels.spread(better_B1.expand_as(values_B2)))
        labels.report("preference_margin", labels.spread((chosen_B1 - rejected_B1).expand_as(values_B2)))
        labels.report("mean_reward", labels.spread(values_B2))
        return labels.spread(cost_B1.expand_as(values_B2))
