"""Proof of a conversion: both models run on the same tokens, and both tokenizers on the same texts."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from megatron.config import Config
from megatron.data.errors import DataError
from megatron.data.tokenizer import Tokenizer, build_tokenizer
from megatron.model.stack import build_model
from megatron.parallel.layers.parameters import logical_of, stored_tensors

from ..format.errors import CheckpointError
from ..read.reader import Checkpoint
from .export import config_of, tensor_reader
from .real_texts import real_texts
from .tokenizer_files import differing

ROUNDING = 2.0**-23  # what one rounding to fp32 changes a number by at most, relative to it
# Two programs of one function round each number some times, in another order. The change of the logits when every
# weight is rounded once more is multiplied by this; the tests have models that need half of it.
ROUNDINGS = 16


@dataclass(frozen=True)
class Proof:
    """How two models and their tokenizers compare.

    Attributes:
        difference: the largest of two logits.
        largest: the largest logit.
        rounding: what rounding every weight once more changes a logit by.
        same_choice: whether all likeliest next tokens are the same.
        tokenizer: how the tokenizers differ, "" where they do not, or None where there are not two.
    """

    difference: float
    largest: float
    rounding: float
    same_choice: bool
    tokenizer: str | None = None

    @property
    def relative(self) -> float:
        return self.difference / self.largest if self.largest else self.difference

    @property
    def bound(self) -> float:
        return ROUNDINGS * self.rounding / self.largest if self.largest else 0.0

    @property
    def holds(self) -> bool:
        """Whether the difference is that of fp32 rounding, and texts have the same ids."""
        return self.relative <= self.bound and not self.tokenizer

    @property
    def values(self) -> dict[str, float | str | bool | None]:
        """For JSON."""
        own = {"difference": self.difference, "relative": self.relative, "bound": self.bound}
        return {**own, "tokenizer": self.tokenizer, "verified": self.holds}

    def __str__(self) -> str:
        choice = "the same" if self.same_choice else "NOT the same"
        ids = {None: "no tokenizer to compare", "": f"the same ids of {len(real_texts())} texts"}
        return (
            f"{'verified' if self.holds else 'NOT verified'}: largest logit difference {self.difference:.3g} (relative "
            f"to the largest logit {self.relative:.3g}, at most {self.bound:.3g} by rounding); the likeliest next "
            f"tokens are {choice}, and {ids.get(self.tokenizer, self.tokenizer)}"
        )


def prove(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype | None, *, tokens: int = 64, seed: int = 0) -> Proof:
    """Run our model with the checkpoint's weights and transformers' with the folder's, both in fp32.

    Args:
        dtype: type in which the weights were exchanged: both models get values that have been rounded to it. None is
            the stored type of each.
        tokens: length of the two samples: random ids, and a text if the run has a tokenizer.
    """
    config = config_of(checkpoint)
    tokenizer = _tokenizer(config)
    model = build_model(config, dtype=torch.float32, values=False).eval()
    read = tensor_reader(checkpoint, dtype)
    with torch.no_grad():
        for tensor in stored_tensors(model):
            tensor.copy_(read(logical_of(tensor).name))
        theirs = _load(folder)
        ids = _samples(config, tokenizer, min(tokens, config.training.sequence_length), seed)
        ours, wanted = model.logits(ids), theirs(ids, use_cache=False).logits.float()
        del theirs
        generator = torch.Generator().manual_seed(seed)
        for tensor in stored_tensors(model):
            tensor.mul_(1 + ROUNDING * (2 * torch.randint(2, tensor.shape, generator=generator) - 1))
        rounding = (model.logits(ids) - ours).abs().max().item()
    return Proof(
        (ours - wanted).abs().max().item(),
        wanted.abs().max().item(),
        rounding,
        ours.argmax(-1).equal(wanted.argmax(-1)),
        None if tokenizer is None or not _has_tokenizer(folder) else differing(folder, tokenizer),
    )


def _tokenizer(config: Config) -> Tokenizer | None:
    try:
        return build_tokenizer(config.tokenizer) if config.tokenizer.type != "none" else None
    except DataError:
        return None


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))


def _samples(config: Config, tokenizer: Tokenizer | None, length: int, seed: int) -> torch.Tensor:
    """Ids [2, length]."""
    size = config.model.vocab_size
    ids = torch.randint(size, (2, length), generator=torch.Generator().manual_seed(seed))
    text = tokenizer.encode("\n".join(real_texts()[:10]))[:length] if tokenizer is not None else []
    if len(text) == length and max(text) < size:
        ids[1] = torch.tensor(text)
    return ids


def _load(folder: Path) -> torch.nn.Module:
    """The model as transformers reads it.

    Raises:
        CheckpointError: it does not; which error it raises depends on what is wrong with which of its files.
    """
    for name in ("torchao", "torch.utils._pytree"):  # transformers imports torchao, which warns of libraries for GPUs
        logging.getLogger(name).setLevel(logging.ERROR)
    disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    except Exception as error:
        raise CheckpointError(folder, f"transformers cannot load it: {error!r:.1000}") from error
