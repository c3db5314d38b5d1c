"""Preference pairs from token files: document n of two files is the chosen and the rejected answer to one prompt.

A sample has one pair as two documents, the chosen one first, and is filled up with labels that do not count. Labels
weigh one over their number in the pair, so that all pairs count equally. The first token of a document is no label.
"""

from __future__ import annotations

from typing import Self

from megatron.config import Config
from megatron.config.problems import UserError

from ..errors import DataError
from ..sample import Sample
from .answers import ENDINGS, Answers, answers_of, check_lengths, options_of, order_of, sample_of

SIDES = ("chosen", "rejected")
KEYS = frozenset(f"{side}{ending}" for side in SIDES for ending in ENDINGS)


class Pairs:
    """Pairs in a new order for each pass.

    Args:
        chosen, rejected: with the same number of documents.
        length: S.
        filler: id of added tokens.

    Raises:
        DataError: files do not match, or a pair has more than S + 1 tokens.
    """

    masked = True
    keys = KEYS
    spare = 0  # places that a pair leaves free in a sample

    def __init__(self, chosen: Answers, rejected: Answers, seed: int, length: int, filler: int):
        self.sides, self.seed, self.length, self.filler = (chosen, rejected), seed, length, filler
        self.count = len(chosen)
        for side in self.sides:
            if len(side) != self.count or not self.count:
                raise DataError(
                    side.path, f"it has {len(side)} documents, chosen has {self.count}", "pair them by number"
                )
        check_lengths(chosen.sizes + rejected.sizes, length, "pairs", self.spare)

    @classmethod
    def build(cls, config: Config, name: str) -> Self:
        """Read `data.options`: `chosen`, `rejected`, and optional keys with the endings `_labels` and `_reference`. Its
        key `validation` has the same keys for the validation set.

        Raises:
            UserError: an option is missing or unknown.
        """
        options = options_of(config.data.options, name, cls.keys)
        chosen, rejected = (answers_of(options, side) for side in SIDES)
        if (chosen.reference is None) != (rejected.reference is None):
            raise UserError("data.options must have chosen_reference and rejected_reference, or neither")
        return cls(chosen, rejected, config.data.seed, config.training.sequence_length, config.tokenizer.eod_id or 0)

    def sample(self, number: int) -> Sample:
        """Sample n: tokens int64 [S+1], weights, documents, and the columns `sequence` and `reference`."""
        pair = self.pair(number)
        return sample_of([(side, pair) for side in self.sides], self.length, self.filler)

    def pair(self, number: int) -> int:
        epoch, place = divmod(number, self.count)
        return int(order_of(self.seed, "pairs", epoch, self.count)[place])
