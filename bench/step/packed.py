"""Documents that share samples, for contenders that keep them apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron.data.sample import documents_and_positions

if TYPE_CHECKING:
    from bench.step.setup import Setup

TOKENS = 500  # of a document, on average


def batch_documents(setup: Setup, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Documents and positions, int32 [1, M, S]: a function of only the step."""
    generator = np.random.default_rng(step % 4)
    begins = generator.random((setup.micro_batch, setup.sequence + 1)) < 1 / TOKENS
    begins[:, 0] = True
    documents, positions = zip(*map(documents_and_positions, begins))
    return torch.from_numpy(np.stack(documents))[None], torch.from_numpy(np.stack(positions))[None]
