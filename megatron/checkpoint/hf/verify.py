"""Proof of a conversion: both models run on the same tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from megatron.model.stack import build_model
from megatron.parallel.layers.parameters import logical_of, stored_tensors

from ..format.errors import CheckpointError
from ..read.reader import Checkpoint
from .export import config_of, tensor_reader

BOUND = 1e-5


@dataclass(frozen=True)
class Proof:
    """The largest difference of two logits, the largest logit, and whether all likeliest next tokens are the same."""

    difference: float
    largest: float
    same_choice: bool

    @property
    def relative(self) -> float:
        return self.difference / self.largest if self.largest else self.difference

    @property
    def holds(self) -> bool:
        """Whether the difference is that of fp32 rounding."""
        return self.relative <= BOUND

    def __str__(self) -> str:
        choice = "the same" if self.same_choice else "NOT the same"
        return (
            f"largest logit difference {self.difference:.3g} (relative to the largest logit {self.relative:.3g}); "
            f"the likeliest next tokens are {choice}"
        )


def prove(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype | None, *, tokens: int = 64, seed: int = 0) -> Proof:
    """Run our model with the checkpoint's weights and transformers' with the folder's, both in fp32.

    Args:
        dtype: type in which the weights were exchanged: both models get values that have been rounded to it.
        tokens: length of the two random samples.
    """
    config = config_of(checkpoint)
    model = build_model(config, dtype=torch.float32, values=False).eval()
    read = tensor_reader(checkpoint, dtype)
    with torch.no_grad():
        for tensor in stored_tensors(model):
            tensor.copy_(read(logical_of(tensor).name))
        theirs = _load(folder)
        length = min(tokens, config.training.sequence_length)
        ids = torch.randint(config.model.vocab_size, (2, length), generator=torch.Generator().manual_seed(seed))
        ours, wanted = model.logits(ids), theirs(ids, use_cache=False).logits.float()
    same = ours.argmax(-1).equal(wanted.argmax(-1))
    return Proof((ours - wanted).abs().max().item(), wanted.abs().max().item(), same)


def _load(folder: Path) -> torch.nn.Module:
    """The model as transformers reads it.

    Raises:
        CheckpointError: it does not; which error it raises depends on what is wrong with which of its files.
    """
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    except Exception as error:
        raise CheckpointError(folder, f"transformers cannot load it: {error!r:.1000}") from error
