"""Weights for a larger vocabulary: known rows are kept, new ones start as their mean or as the run's initial values.

`checkpoint.initialize_vocabulary` chooses. A row means a token, so each token of the old tokenizer must have the
same id in the new one. Rows after the old tokenizer's last token, which only pad the table, count as new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import torch

from megatron.checkpoint import Checkpoint, Fragment, FragmentSpec
from megatron.checkpoint.configuration import config_of
from megatron.checkpoint.format.errors import CheckpointError
from megatron.checkpoint.format.fragment import WEIGHT
from megatron.config import Config
from megatron.config.sections.data import TokenizerSection
from megatron.data.errors import DataError
from megatron.data.tokenizer import HuggingFaceTokenizer, build_tokenizer
from megatron.parallel.layout.shard import LogicalTensor

from .upcycle import shard_of

TABLES = ("embedding.tokens.weight", "head.weight", "head.bias")
SAME, MEAN, INITIAL = "same", "mean", "initial"


def extended(
    checkpoint: Checkpoint, targets: Iterable[Fragment], config: Config, log: Callable[[str], None]
) -> tuple[list[Fragment], list[tuple[Fragment, LogicalTensor]], int]:
    """(targets that are read as they are, targets with new rows and the stored tensor of each, number of known rows).

    Raises:
        CheckpointError: a token has another id than in the weights' tokenizer, or the vocabulary is smaller.
    """
    rest: list[Fragment] = []
    made: list[tuple[Fragment, LogicalTensor]] = []
    if config.checkpoint.initialize_vocabulary == SAME or TABLES[0] not in checkpoint.tensors:
        return list(targets), made, 0
    stored = checkpoint.tensors[TABLES[0]].shape[0]
    known = min(stored, _known_tokens(checkpoint, config, log) or stored)
    if config.model.vocab_size < known:
        raise CheckpointError(
            checkpoint.path,
            f"it has {known} tokens, and model.vocab_size is {config.model.vocab_size}: "
            "rows can be added, not taken away",
        )
    for target in targets:
        if target.tensor.name in TABLES and target.tensor.name in checkpoint.tensors:
            made.append((target, checkpoint.tensors[target.tensor.name]))
        else:
            rest.append(target)
    how = "the mean of the others" if config.checkpoint.initialize_vocabulary == MEAN else "this run's initial values"
    log(f"{known} rows of the vocabulary are kept, and the other {config.model.vocab_size - known} start as {how}")
    return rest, made, known


def extend(checkpoint: Checkpoint, made: Iterable[tuple[Fragment, LogicalTensor]], known: int, mean: bool) -> None:
    """Fill the targets that `extended` found. One stored table is in memory at a time."""
    last = ""
    table = kept = torch.empty(0)
    for target, origin in made:
        if origin.name != last:
            stored = checkpoint.read(FragmentSpec.whole(origin, WEIGHT), torch.float32).data.view(origin.shape)
            last, table = origin.name, stored.new_zeros(target.tensor.shape)
            kept = torch.ones(target.tensor.shape, dtype=torch.bool)
            table[:known] = stored[:known]
            if mean:
                table[known:] = stored[:known].double().mean(0).float()
            else:
                kept[known:] = False
        stop = target.start + len(target.data)
        values = shard_of(table, target.tensor, 0, target).reshape(-1)[target.start : stop]
        mask = shard_of(kept, target.tensor, 0, target).reshape(-1)[target.start : stop].to(target.data.device)
        target.data.copy_(torch.where(mask, values.to(target.data), target.data))


def _ids(section: TokenizerSection) -> dict[str, int]:
    return cast(HuggingFaceTokenizer, build_tokenizer(section)).backend.get_vocab()


def _known_tokens(checkpoint: Checkpoint, config: Config, log: Callable[[str], None]) -> int | None:
    """Number of the checkpoint's rows with a token. None if its tokenizer cannot be read."""
    before = config_of(checkpoint).tokenizer
    now = config.tokenizer
    if (before.type, before.path) == (now.type, now.path) and before.type != "huggingface":
        return None
    if before.type != "huggingface" or now.type != "huggingface":
        types = f"{before.type} and {now.type}"
        log(f"warning: the tokenizers ({types}) cannot be compared, so every row of the checkpoint is kept")
        return None
    try:
        old = _ids(before)
    except (DataError, OSError, ValueError) as error:
        log(f"warning: the checkpoint's tokenizer cannot be read ({error}), so every row of the checkpoint is kept")
        return None
    new = _ids(now)
    moved = sorted((number, token) for token, number in old.items() if new.get(token) != number)
    if moved:
        number, token = moved[0]
        raise CheckpointError(
            checkpoint.path,
            f"its rows would mean other tokens: {len(moved)} tokens of its tokenizer have another id or none in "
            f"{now.path}. The first is {token!r} ({number}, now {new.get(token)}). Extend the checkpoint's tokenizer",
        )
    return max(old.values()) + 1
