"""Final weights of a sample's labels: the objective's times the data's."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from megatron.objectives.contract import Objective

from .errors import DataError
from .sample import Sample


@dataclass(frozen=True)
class Targets:
    """Final treatment of a plan's samples.

    Attributes:
        objective: None keeps the weights of the data.
        boundaries: mark starts of documents.
    """

    objective: Objective | None = None
    boundaries: bool = False

    @property
    def weighs(self) -> bool:
        return self.objective is not None and self.objective.weighs

    @property
    def columns(self) -> tuple[str, ...]:
        """Numbers of each label that samples must have."""
        return () if self.objective is None else self.objective.columns

    @property
    def context(self) -> int:
        """Tokens before a sample that its weights depend on."""
        return self.objective.context if self.weighs and self.objective is not None else 0

    @property
    def marks_documents(self) -> bool:
        """Whether samples must mark starts of documents."""
        return self.boundaries or (self.objective is not None and self.objective.needs_documents)

    def of(self, sample: Sample) -> Sample:
        """The sample with its labels' final weights.

        Raises:
            DataError: the objective does not give a weight of at least 0 for each label.
        """
        begins = sample.begins if self.boundaries else None
        if self.objective is None or not self.objective.weighs:
            return sample if begins is sample.begins else replace(sample, begins=begins)
        weights = self._weights(sample, self.objective)
        if weights.shape != (len(sample.tokens) - 1,) or not (np.isfinite(weights) & (weights >= 0)).all():
            raise DataError(
                "objective.type",
                f"each of a sample's {len(sample.tokens) - 1} labels must have a finite weight of at least 0: "
                f"{type(self.objective).__name__} gives an array {weights.shape} from {weights.min(initial=np.inf)} "
                f"to {weights.max(initial=-np.inf)}",
                "fix its method weights",
            )
        return replace(sample, weights=weights if sample.weights is None else weights * sample.weights, begins=begins)

    @staticmethod
    def _weights(sample: Sample, objective: Objective) -> np.ndarray:
        """The objective's weights of a sample's labels, read with the tokens before it."""
        tokens, begins = sample.tokens, sample.begins if objective.needs_documents else None
        lead = 0 if sample.lead is None else len(sample.lead)
        if sample.lead is not None and lead:
            tokens = np.concatenate([sample.lead.astype(np.int64), tokens])
            if begins is not None:
                begins = np.concatenate([np.arange(lead) == 0, [False], begins[1:]])
        return np.asarray(objective.weights(tokens, begins), np.float32)[lead:]
