"""Focal loss (Lin et al. 2017, arXiv 1708.02002) of labels that have some of their document before them."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from megatron.config import Config
from megatron.config.problems import UserError
from megatron.objectives.contract import Objective


class Focal(Objective):
    """A label of probability p costs (1 - p)^gamma times its cross-entropy: well predicted ones count for less.

    Args:
        gamma: 0, which is the cross-entropy, or at least 1.
        context: a label counts if at least this number of tokens of its document precedes it. Whatever is smaller can
            only be guessed.
    """

    def __init__(self, gamma: float, context: int) -> None:
        self.gamma, self.context = gamma, context
        self.weighs = self.needs_documents = context > 0

    @classmethod
    def build(cls, config: Config) -> Focal:
        options = {"gamma": 2.0, "context": 0, **config.objective.options}
        if unknown := sorted(map(str, options.keys() - {"gamma", "context"})):
            raise UserError(f"objective.options must not have {', '.join(unknown)}: use gamma, context")
        gamma, context = options["gamma"], options["context"]
        if isinstance(gamma, bool) or not isinstance(gamma, int | float) or not (gamma == 0 or gamma >= 1):
            raise UserError(f"objective.options.gamma must be 0 or a number of at least 1, not {gamma!r}")
        if isinstance(context, bool) or not isinstance(context, int) or context < 0:
            raise UserError(f"objective.options.context must be a whole number of at least 0, not {context!r}")
        return cls(gamma, context)

    def weights(self, tokens: np.ndarray, begins: np.ndarray | None) -> np.ndarray:
        places = np.arange(len(tokens))
        if begins is not None:  # a sample may begin in the midst of a document, whose first tokens it does not have
            places = places - np.maximum.accumulate(np.where(begins, places, 0))
        return (places[1:] >= self.context).astype(np.float32)

    def cost(self, ce_N: Tensor, lse_N: Tensor) -> Tensor:
        missed_N = -(-ce_N.clamp(min=0)).expm1()  # 1 - p
        return missed_N.pow(self.gamma) * ce_N
