"""The part of an optimizer step that one data parallel rank reads."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class StepBatch:
    """One data parallel rank's part of one step, as CPU tensors.

    Shapes: A micro-batches (accumulation), M samples per micro-batch, S = sequence length.

    Attributes:
        step: the optimizer step, from 0.
        tokens: int64 [A, M, S+1]. Inputs are `[..., :-1]`, labels `[..., 1:]`.
        sample_ids: int64 [A, M], the global number n of each sample. Step s begins with the sum of the
            batch sizes before it, plus the skipped samples.
        hash: sum modulo 2**64 of `hashing.sample_hash` over this rank's samples. The sum over data parallel ranks is
            the global batch's hash.
        loss_mask: float32 [A, M, S], the weight of each label. None: all ones, on all ranks and in all steps.
        documents: int32 [A, M, S], the index of each input token's document inside its sample. None if documents of
            one sample attend to each other.
        positions: int32 [A, M, S], each input token's place in its document. None without `documents`.
        columns: float32 [A, M, S], further numbers of each label, by name.
    """

    step: int
    tokens: torch.Tensor
    sample_ids: torch.Tensor
    hash: int
    loss_mask: torch.Tensor | None = None
    documents: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def inputs(self) -> torch.Tensor:
        """int64 [A, M, S]."""
        return self.tokens[..., :-1]

    @property
    def labels(self) -> torch.Tensor:
        """int64 [A, M, S]."""
        return self.tokens[..., 1:]

    @property
    def accumulation(self) -> int:
        return self.tokens.shape[0]
