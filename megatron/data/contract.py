"""The contract of a source of samples that replaces token files, and the source `copy`."""

from typing import Protocol, Self

import numpy as np

from megatron.config import Config

from .errors import DataError
from .hashing import generator
from .sample import Sample


class SampleSource(Protocol):
    """Samples by number: drawn, or of another program.

    Sample n must be a function of the configuration, the set's name and n only: ranks, threads that read ahead and
    resumed runs ask for any number, in any order. So draws are keyed (`hashing.generator`), never counted.

    Attributes:
        masked: whether samples have weights. All ranks need it before they read.
    """

    masked: bool

    @classmethod
    def build(cls, config: Config, name: str) -> Self:
        """The source of a resolved configuration, whose `data.options` it reads.

        Args:
            name: "train", or the name of a validation set.

        Raises:
            UserError: an option has a wrong value.
        """

    def sample(self, number: int) -> Sample:
        """Sample n: tokens int64 [S+1] with ids below `model.vocab_size`, weights [S] if `masked`, and optionally
        `begins`, without which it is one document."""


class Copy:
    """Random tokens, then the same tokens again. Only the second half can be predicted.

    Sample n is a function of (seed, n, vocabulary, sequence length). A model that has learned to copy has a loss of
    about ln(symbols) / 2. A model that knows only the tokens' frequencies has ln(symbols)."""

    masked = False

    def __init__(self, seed: int, vocabulary: int, sequence_length: int, name: str = "train"):
        """Ids are below `vocabulary`. `name` is the set's, so that training and validation have different samples."""
        if vocabulary < 2:
            raise DataError("model.vocab_size", "synthetic data need at least 2 ids", "set model.vocab_size")
        self.seed, self.sequence_length, self.name = seed, sequence_length, name
        self.symbols = min(vocabulary, 64)
        self.period = (sequence_length + 2) // 2

    @classmethod
    def build(cls, config: Config, name: str) -> "Copy":
        return cls(config.data.seed, config.model.vocab_size, config.training.sequence_length, name)

    def sample(self, number: int) -> Sample:
        return Sample(self.tokens(number))

    def tokens(self, sample: int) -> np.ndarray:
        """int64 [S+1] tokens of sample n."""
        half = generator(self.seed, "copy", self.name, sample).integers(self.symbols, size=self.period)
        return np.concatenate([half, half])[: self.sequence_length + 1]
