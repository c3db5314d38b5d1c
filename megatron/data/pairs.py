"""Preference pairs from token files: document n of two files is the chosen and the rejected answer to one prompt.

A sample has one pair as two documents, the chosen one first, and is filled up with labels that do not count. Labels
weigh one over their number in the pair, so that all pairs count equally. The first token of a document is no label.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Self

import numpy as np

from megatron.config import Config
from megatron.config.problems import UserError

from .errors import DataError
from .keyed import generator
from .sample import IGNORED, Sample
from .token_file import TokenFile

SIDES = ("chosen", "rejected")
KEYS = {f"{side}{what}" for side in SIDES for what in ("", "_labels", "_reference")}


class Pairs:
    """Pairs in a new order for each pass.

    Args:
        files: side -> paths of its token file, its label file (-100: no label) or None, and its log-probabilities under
            the reference or None.
        length: S.
        filler: id of added tokens.

    Raises:
        DataError: files do not match, or a pair has more than S + 1 tokens.
    """

    masked = True

    def __init__(self, files: Mapping[str, tuple[str, str | None, str | None]], seed: int, length: int, filler: int):
        self.seed, self.length, self.filler = seed, length, filler
        self.tokens = {side: TokenFile(found[0]) for side, found in files.items()}
        self.labels = {side: TokenFile(found[1]) for side, found in files.items() if found[1] is not None}
        self.count = len(self.tokens["chosen"])
        for side, file in self.tokens.items():
            path = files[side][0]
            if len(file) != self.count or not self.count:
                raise DataError(path, f"it has {len(file)} documents, chosen has {self.count}", "pair them by number")
            if side in self.labels and not np.array_equal(self.labels[side].sizes, file.sizes):
                raise DataError(path, "its label file has documents of other sizes", "make a label for each token")
        self.reference = {side: _reference(found[2], self.tokens[side]) for side, found in files.items() if found[2]}
        sizes = np.sum([file.sizes.astype(np.int64) for file in self.tokens.values()], 0)
        if (long := int((sizes > length + 1).sum())) > 0:
            rule = (
                f"{long} of {self.count} pairs have more than the {length + 1} tokens of a sample, up to {sizes.max()}"
            )
            raise DataError("training.sequence_length", rule, f"use at least {sizes.max() - 1}, or remove long pairs")

    @classmethod
    def build(cls, config: Config, name: str) -> Self:
        """Read `data.options`: `chosen`, `rejected`, and optional keys with the endings `_labels` and `_reference`. Its
        key `validation` has the same keys for the validation set.

        Raises:
            UserError: an option is missing or unknown.
        """
        options: dict[str, Any] = dict(config.data.options)
        held_out = options.pop("validation", None)
        if name != "train":
            if not isinstance(held_out, Mapping):
                raise UserError(f"data.options.{name} must have pairs of its own, or nothing must be evaluated")
            options = dict(held_out)
        if unknown := sorted(options.keys() - KEYS):
            raise UserError(f"data.options must not have {', '.join(unknown)}: use {', '.join(sorted(KEYS))}")
        if missing := [side for side in SIDES if not isinstance(options.get(side), str)]:
            raise UserError(f"data.options.{missing[0]} must be the path of a token file, without .bin or .idx")
        files = {
            side: (options[side], options.get(f"{side}_labels"), options.get(f"{side}_reference")) for side in SIDES
        }
        if len({found[2] is None for found in files.values()}) > 1:
            raise UserError("data.options must have chosen_reference and rejected_reference, or neither")
        return cls(files, config.data.seed, config.training.sequence_length, config.tokenizer.eod_id or 0)

    def sample(self, number: int) -> Sample:
        """Sample n: tokens int64 [S+1], weights, documents, and the columns `sequence` and `reference`."""
        epoch, place = divmod(number, self.count)
        pair = int(_order(self.seed, epoch, self.count)[place])
        tokens = np.full(self.length + 1, self.filler, np.int64)
        begins = np.zeros(self.length + 1, bool)
        columns = {"sequence": np.full(self.length + 1, -1, np.float32)}
        if self.reference:
            columns["reference"] = np.zeros(self.length + 1, np.float32)
        counts, begin = np.zeros(self.length + 1, bool), 0
        for index, side in enumerate(SIDES):
            file = self.tokens[side]
            own, first = file[pair], int(file.starts(slice(pair, pair + 1))[0])
            here = slice(begin, begin + len(own))
            tokens[here], begins[begin], counts[here] = own, True, True
            columns["sequence"][here] = index
            if side in self.labels:
                counts[here] = self.labels[side][pair] != IGNORED
            counts[begin] = False  # it would follow from another document
            if self.reference:
                columns["reference"][here] = self.reference[side][first : first + len(own)]
            begin += len(own)
        if begin <= self.length:
            begins[begin] = True
        weights = counts[1:].astype(np.float32) / max(1, int(counts.sum()))
        own_columns = {
            name: np.where(counts, each, -1 if name == "sequence" else 0)[1:] for name, each in columns.items()
        }
        return Sample(
            tokens, weights, begins, columns={name: each.astype(np.float32) for name, each in own_columns.items()}
        )


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    return generator(seed, "pairs", epoch).permutation(count)


def _reference(path: str, file: TokenFile) -> np.ndarray:
    """Log-probabilities, one for each token of the file, memory-mapped."""
    fix = "write them with numpy.save, one number for each token of the token file"
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(path, f"log-probabilities cannot be read: {error}", fix) from error
    if not isinstance(found, np.ndarray) or found.shape != (file.tokens,) or found.dtype.kind != "f":
        raise DataError(path, f"it must have one number for each of {file.tokens} tokens", fix)
    if not (np.isfinite(found) & (found <= 0)).all():
        raise DataError(path, "each log-probability must be a finite number of at most 0", fix)
    return found
