"""Data that a run makes itself, for tests and for models that learn without files."""

from __future__ import annotations

import numpy as np

from megatron.config import Config

from .errors import DataError
from .keyed import generator
from .sample import Sample


class Copy:
    """Random tokens, then the same tokens again. Only the second half can be predicted.

    Sample n is a function of (seed, n, vocabulary, sequence length). A model that has learned to copy has a loss of
    about ln(symbols) / 2. A model that knows only the tokens' frequencies has ln(symbols).
    """

    masked = False

    def __init__(self, seed: int, vocabulary: int, sequence_length: int, name: str = "train"):
        """Ids are below `vocabulary`. `name` is the set's, so that training and validation have different samples."""
        if vocabulary < 2:
            raise DataError("model.vocab_size", "synthetic data need at least 2 ids", "set model.vocab_size")
        self.seed, self.sequence_length, self.name = seed, sequence_length, name
        self.symbols = min(vocabulary, 64)
        self.period = (sequence_length + 2) // 2

    @classmethod
    def build(cls, config: Config, name: str) -> Copy:
        return cls(config.data.seed, config.model.vocab_size, config.training.sequence_length, name)

    def sample(self, number: int) -> Sample:
        return Sample(self.tokens(number))

    def tokens(self, sample: int) -> np.ndarray:
        """int64 [S+1] tokens of sample n."""
        half = generator(self.seed, "copy", self.name, sample).integers(self.symbols, size=self.period)
        return np.concatenate([half, half])[: self.sequence_length + 1]
