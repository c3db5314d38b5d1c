"""Pairs of answers with one value each: at the last token, or before the only label of its label file."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import numpy as np

from megatron.config import Config
from megatron.config.problems import UserError

from ..errors import DataError
from ..sample import Sample
from .answers import numbers_of, options_of
from .pairs import SIDES, Pairs

KEYS = frozenset({*SIDES, *(f"{side}_labels" for side in SIDES), "margins"})


class RewardPairs(Pairs):
    """The pairs of `Pairs`. Both values weigh a half. GPT-NeoX's label files have one label in each answer.

    Attributes:
        margins: one number for each pair, or None.
    """

    keys = KEYS
    spare = 1  # the last token of a pair is an input too
    margins: np.ndarray | None = None

    @classmethod
    def build(cls, config: Config, name: str) -> Self:
        """Read `data.options`: `chosen`, `rejected`, and optionally their `_labels`, and `margins`.

        Raises:
            UserError: an option is missing or unknown.
            DataError: a label file has more or fewer than one label in a document.
        """
        made = super().build(config, name)
        for side in made.sides:
            if not side.sizes.all():
                rule = f"document {int(side.sizes.argmin())} must have a token, at which its value is read"
                raise DataError(side.path, rule, "remove the pair from both files")
            for number in range(made.count if side.labels is not None else 0):
                if (count := int(side.counts(number).sum())) != 1:
                    rule = f"document {number} must have one label that counts, behind the value: it has {count}"
                    raise DataError(side.path, rule, "omit the label files: the value is then at the last token")
        path = options_of(config.data.options, name, cls.keys).get("margins")
        if path is not None and not isinstance(path, str):
            raise UserError(f"data.options.margins must be the path of a .npy file, not {path!r}")
        made.margins = None if path is None else numbers_of(path, made.count, "document")
        return made

    def sample(self, number: int) -> Sample:
        """Sample n: tokens int64 [S+1], weights, documents, and the columns `sequence` and `margin`."""
        pair, made = self.pair(number), super().sample(number)
        weights, sequence = np.zeros(self.length, np.float32), np.full(self.length, -1, np.float32)
        begin = 0
        for index, side in enumerate(self.sides):
            size = int(side.sizes[pair])
            place = begin + (size if side.labels is None else int(side.counts(pair).argmax())) - 1
            weights[place], sequence[place] = 0.5, index
            begin += size
        margin = np.full(self.length, 0.0 if self.margins is None else self.margins[pair], np.float32)
        return replace(made, weights=weights, columns={"sequence": sequence, "margin": margin})
