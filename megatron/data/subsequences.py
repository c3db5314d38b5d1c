"""Cut a batch into shorter samples: the same tokens and labels, with less text before each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from .batch import StepBatch
from .hashing import batch_hash, sample_hash


def cut_samples(batch: StepBatch, length: int, indices: np.ndarray) -> StepBatch:
    """Cut each sample into pieces of `length` tokens, which become samples. Each label stays one label.

    Piece k of sample n is sample n * pieces + k of the new batch. Its numbers, hashes, documents and positions are as
    if the batch had been read with samples of this length. `indices` are the places of the samples in the global batch,
    int64 [A, M].
    """
    pieces = batch.inputs.shape[-1] // length
    if pieces == 1:
        return batch
    shape = (batch.tokens.shape[0], -1, length)

    def parts(whole: torch.Tensor | None) -> torch.Tensor | None:
        return None if whole is None else whole.reshape(shape)

    tokens = batch.tokens.unfold(-1, length + 1, length).reshape(*shape[:2], length + 1)
    numbers = (batch.sample_ids[..., None] * pieces + torch.arange(pieces)).flatten(1)
    places = indices[..., None] * pieces + np.arange(pieces)
    hashes = map(sample_hash, places.flatten().tolist(), tokens.flatten(0, 1).numpy())
    documents, positions = parts(batch.documents), parts(batch.positions)
    if documents is not None and positions is not None:
        documents = documents - documents[..., :1]
        positions = positions - positions[..., :1] * (documents == 0)
    return replace(
        batch,
        tokens=tokens,
        sample_ids=numbers,
        hash=batch_hash(hashes),
        loss_mask=parts(batch.loss_mask),
        documents=documents,
        positions=positions,
    )
