"""The contract of objectives, of this folder and of users' packages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.config import Config
    from megatron.parallel.layers.label_costs import Labels
    from megatron.parallel.layers.objective_logits import ChunkLogits


@dataclass(frozen=True)
class TeacherOptions:
    """Costs with a frozen teacher. With its logits u, the student's l and the temperature T, each label costs (1 -
    share) * cost + share * T**2 * KL(softmax(u / T) || softmax(l / T)). See `parallel/layers/objective_logits.py`."""

    share: float
    temperature: float


class Objective:
    """The loss of a step is the sum of weight * (cost + z-loss) over the labels of the global batch, divided by the sum
    of their weights.

    Weights are the data's (label files, `data.mask_loss_at_eod`) times `weights`. All methods are functions of only
    their arguments, so that no layout, restart or order of reading changes them. They concern only training. The losses
    of validation, and the loss that a training step reports, are cross-entropies. A training step reports their mean by
    weight over the labels that count.

    Attributes:
        weighs: whether `weights` gives any weights. All ranks must know it before they read data.
        needs_documents: whether `weights` reads where documents begin.
        context: number of tokens before a sample that `weights` reads too, where the sample begins within a document.
        columns: numbers of each label that the data must have, by name (`Sample.columns`), for `cost_of_labels`.
        sequences: the number of sequences in a sample whose sums `cost_of_labels` reads. The column "sequence" numbers
            them from 0, and -1 is a label of none.
        reports: names of numbers that `cost_of_labels` reports.
        scores: whether `cost_of_labels` reads a scalar of each token, `Labels.log_p_BS`, in place of the label's
            log-probability. The model then has a head with one output in place of the language model's, and
            evaluations report the objective's loss.
        probes: whether a step begins with `of_probes`. The source of samples then has `probe(number)`, which returns
            the probe of sample n, a `Sample`.
        columns_of_probes: numbers of each label that probes must have, by name.
        teacher: None, or how the model that `objective.teacher` names teaches.
    """

    weighs = False
    needs_documents = False
    context = 0
    columns: tuple[str, ...] = ()
    sequences = 0
    reports: tuple[str, ...] = ()
    scores = False
    probes = False
    columns_of_probes: tuple[str, ...] = ()
    teacher: TeacherOptions | None = None

    @classmethod
    def build(cls, config: Config) -> Self:
        """The objective of a resolved configuration, whose section `objective` has its options.

        Raises:
            UserError: an option has a wrong value.
        """
        return cls()

    def weights(self, tokens: np.ndarray, begins: np.ndarray | None) -> np.ndarray:
        """The weight of each label of a sample, [S], at least 0. Called in the threads that read ahead.

        Args:
            tokens: int64 [S+1]. Label i is token i + 1. Up to `context` tokens of the sample's first document may stand
                before them. Their weights are not used.
            begins: whether a document begins at each token, bool. None unless `needs_documents`.
        """
        return np.ones(len(tokens) - 1, np.float32)

    def cost(self, ce_N: Tensor, lse_N: Tensor) -> Tensor:
        """Cost of each label, [N], element by element: labels come in pieces that depend on the layout.

        Autograd differentiates it. A cost that needs more than these two is a `cost_of_logits`.

        Args:
            ce_N: cross-entropy in nats, lse - logit of the label, in fp32.
            lse_N: log of the sum of exp(logit) over the vocabulary.
        """
        return ce_N

    def cost_of_logits(self, logits: ChunkLogits) -> Tensor:
        """The cost of each label, [C], from the logits of a chunk of tokens, in place of `cost`.

        Logits exist for one chunk of tokens at a time (`training.loss_chunk`), and each tensor parallel rank has the
        logits of its own ids. `logits.sum`, `largest` and `of` read the whole vocabulary, and give the same on all
        ranks. Autograd differentiates all of it. A label's cost must not depend on other labels.

        Args:
            logits: in at least fp32 (`parallel/layers/objective_logits.py`).
        """
        raise NotImplementedError

    def cost_of_labels(self, labels: Labels) -> Tensor:
        """The cost of each label, [B, s], from log-probabilities, numbers of the data and sums over sequences.

        It is used in place of `cost`. The head computes log-probabilities twice, the second time with the weights that
        follow from these costs. Autograd differentiates them. Labels of a sequence may be on several ranks, so sums
        over a sequence must go through `labels.sum`.

        Args:
            labels: of a micro-batch (`parallel/layers/label_costs.py`).
        """
        raise NotImplementedError

    def counted(self, weights: Tensor, columns: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Kinds of labels over which `cost_of_labels` takes means: by name, whether each label is one.

        The mean is over the labels of all ranks in a step. `Labels.units` has what one such label weighs in it."""
        return {}

    def of_probes(self, labels: Labels) -> Mapping[str, Tensor]:
        """Numbers [B] of some probes by name, without gradient. `cost_of_labels` finds their means over the probes of
        the global batch in `Labels.known`.

        Args:
            labels: whole samples.
        """
        raise NotImplementedError

    @property
    def costs(self) -> bool:
        """Whether the cost is not the cross-entropy."""
        return type(self).cost is not Objective.cost

    @property
    def reads_logits(self) -> bool:
        return type(self).cost_of_logits is not Objective.cost_of_logits

    @property
    def reads_labels(self) -> bool:
        return type(self).cost_of_labels is not Objective.cost_of_labels
