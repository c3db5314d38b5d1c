"""Limit of documents per micro-batch, for kernels that need one (`kinds/common/attention/varlen.py`)."""

import torch

from megatron.config import Config
from megatron.data.batch import StepBatch
from megatron.data.errors import DataError

from ..base import BaseEngine
from ..part import EnginePart

MOST = "model.fused_attention.most_documents"


def document_limit(config: Config, device: torch.device) -> int | None:
    """Documents per sample, on average over a micro-batch. None: no limit."""
    options = config.model.fused_attention
    return options.most_documents if options.documents == "varlen" and device.type == "cuda" else None


def refuse_more_documents(batch: StepBatch, most: int) -> None:
    """Count documents on the host. Kernels would merge those beyond the limit.

    Raises:
        DataError: a micro-batch has too many.
    """
    if batch.documents is None:
        return
    found = batch.documents[..., -1].long().sum(-1) + batch.documents.shape[1]  # [A], numbered from 0
    largest = int(found.max())
    if largest > most * batch.documents.shape[1]:
        needed = -(-largest // batch.documents.shape[1])
        raise DataError(
            MOST,
            f"{most} a sample must be room for the documents of every micro-batch, and one has {largest} in "
            f"{batch.documents.shape[1]} samples",
            f"use {MOST}={2 * needed}, or model.fused_attention.documents=auto, and resume",
        )


class DocumentLimit(EnginePart):
    def attach(self, engine: BaseEngine) -> None:
        self._most = document_limit(engine.config, engine.device)

    def check_batch(self, batch: StepBatch) -> None:
        if self._most is not None:
            refuse_more_documents(batch, self._most)
