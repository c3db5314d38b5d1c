"""What a source of samples is that a run has instead of token files: `synthetic.Copy`, or one from a user's package."""

from __future__ import annotations

from typing import Protocol, Self

from megatron.config import Config

from .sample import Sample


class SampleSource(Protocol):
    """Samples by their number: a task that is drawn, or what another program keeps.

    Sample n must be a function of the configuration, the set's name and n alone: ranks, threads that read ahead and
    resumed runs ask for any number, in any order. So draws are keyed (`megatron.data.keyed.generator`), never counted.

    Attributes:
        masked: whether samples have weights. All ranks must know it before they read anything.
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
        """Sample n: tokens int64 [S+1], ids below `model.vocab_size`; weights [S] if `masked`; and, where it has
        several documents, `begins`. Without `begins` it is one document."""
