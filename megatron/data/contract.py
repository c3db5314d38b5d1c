"""The contract of a source of samples that replaces token files, such as `synthetic.Copy` or a user's."""

from __future__ import annotations

from typing import Protocol, Self

from megatron.config import Config

from .sample import Sample


class SampleSource(Protocol):
    """Samples by number: drawn, or of another program.

    Sample n must be a function of the configuration, the set's name and n only: ranks, threads that read ahead and
    resumed runs ask for any number, in any order. So draws are keyed (`megatron.data.keyed.generator`), never counted.

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
