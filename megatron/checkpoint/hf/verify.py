"""Verify a conversion: run both models on the same tokens, and both tokenizers on the same texts."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils.logging import disable_progress_bar

from megatron.config import Config
from megatron.data.errors import DataError
from megatron.data.tokenizer import Tokenizer, build_tokenizer
from megatron.model.stack import Model, build_model
from megatron.parallel.layers.parameters import logical_of, stored_tensors

from ..format.errors import CheckpointError
from ..read.reader import Checkpoint
from .export import config_of, tensor_reader
from .tokenizer_files import differing, real_texts

ROUNDING = 2.0**-23  # largest relative change by one rounding to fp32
# Two programs of one function round each number several times, in different orders. The change of the logits when every
# weight is rounded once more is multiplied by this. Models in the tests need half of it.
ROUNDINGS = 16


@dataclass(frozen=True)
class Proof:
    """Comparison of two models and their tokenizers.

    Attributes:
        difference: largest difference of two logits.
        rounding: largest change of a logit if every weight is rounded once more.
        same_choice: whether all likeliest next tokens are the same.
        tokenizer: the tokenizers' difference, "" without one, None without two tokenizers.
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
        """Whether the difference is fp32 rounding, and the texts' ids are equal."""
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
            f"to the largest logit {self.relative:.3g}, at most {self.bound:.3g} by rounding). The likeliest next "
            f"tokens are {choice}, and {ids.get(self.tokenizer, self.tokenizer)}"
        )


def prove(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype | None, *, tokens: int = 64, seed: int = 0) -> Proof:
    """Run our model with the checkpoint's weights and transformers' with the folder's, both in fp32.

    Args:
        dtype: type of the exchanged weights, to which both models' values are rounded. None: each stored type.
        tokens: length of the two samples: random ids, and a text if the run has a tokenizer.
    """
    config = config_of(checkpoint)
    tokenizer = _tokenizer(config)
    model = build_model(config, dtype=torch.float32, values=False).eval()
    read = tensor_reader(checkpoint, dtype)
    with torch.no_grad():
        for tensor in stored_tensors(model):
            tensor.copy_(read(logical_of(tensor).name))
        theirs = _load(folder, scores=model.head.value is not None)
        ids = _samples(config, tokenizer, min(tokens, config.training.sequence_length), seed)
        ours = _outputs(model, ids)
        wanted = torch.cat([theirs(row[None], use_cache=False).logits.float() for row in ids])
        del theirs
        generator = torch.Generator().manual_seed(seed)
        for tensor in stored_tensors(model):
            tensor.mul_(1 + ROUNDING * (2 * torch.randint(2, tensor.shape, generator=generator) - 1))
        rounding = (_outputs(model, ids) - ours).abs().max().item()
    return Proof(
        (ours - wanted).abs().max().item(),
        wanted.abs().max().item(),
        rounding,
        ours.argmax(-1).equal(wanted.argmax(-1)),
        None if tokenizer is None or not _has_tokenizer(folder) else differing(folder, tokenizer),
    )


def _outputs(model: Model, ids: torch.Tensor) -> torch.Tensor:
    """Logits [2, S, V], or a reward model's value [2, 1] of a text."""
    if model.head.value is None:
        return model.logits(ids)
    return model.head.values_at(model.head.read(model.stream(ids)))[:, -1:]


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


def _load(folder: Path, scores: bool = False) -> torch.nn.Module:
    """The model as transformers reads it."""
    for name in ("torchao", "torch.utils._pytree"):  # transformers imports torchao, which warns of libraries for GPUs
        logging.getLogger(name).setLevel(logging.ERROR)
    disable_progress_bar()
    try:
        kind = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
        found = kind.from_pretrained(folder, dtype=torch.float32).eval()
        if scores:
            found.config.pad_token_id = None  # the value is that of the last token
        return found
    except Exception as error:
        raise CheckpointError(folder, f"transformers cannot load it: {error!r:.1000}") from error
