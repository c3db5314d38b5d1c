"""Associative recall with several queries (Arora et al. 2023, "Zoology", arXiv 2312.04927): a task for mixers."""

from __future__ import annotations

import numpy as np

from megatron.config import Config
from megatron.config.problems import UserError
from megatron.data.hashing import generator
from megatron.data.sample import Sample


class Recall:
    """Samples of key, value, key, value ...: keys all differ in the first half, and the second half asks for some of
    them again. Only the values that are asked for are targets, since nothing else can be predicted.

    Keys are the first half of the vocabulary, values the second.

    Args:
        pairs: different keys of a sample.
        queries: how many are asked for, each once.
    """

    masked = True

    def __init__(self, seed: int, name: str, vocabulary: int, length: int, pairs: int, queries: int) -> None:
        self.seed, self.name, self.half, self.length = seed, name, vocabulary // 2, length
        self.pairs, self.queries = pairs, queries

    @classmethod
    def build(cls, config: Config, name: str) -> Recall:
        length, vocabulary = config.training.sequence_length, config.model.vocab_size
        options = {"pairs": 4, "queries": 4, **config.data.options}
        if unknown := sorted(map(str, options.keys() - {"pairs", "queries"})):
            raise UserError(f"data.options must not have {', '.join(unknown)}: use pairs, queries")
        for option, most in (("pairs", vocabulary // 2), ("queries", options["pairs"])):
            value = options[option]
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise UserError(f"data.options.{option} must be a whole number from 1 to {most}, not {value!r}")
        if 2 * (options["pairs"] + options["queries"]) > length + 1:
            raise UserError(f"2 * (pairs + queries) of data.options must be at most {length + 1} tokens of a sample")
        return cls(config.data.seed, name, vocabulary, length, options["pairs"], options["queries"])

    def sample(self, number: int) -> Sample:
        draw = generator(self.seed, "recall", self.name, number)
        keys = draw.permutation(self.half)[: self.pairs]
        values = self.half + draw.integers(self.half, size=self.pairs)
        asked = draw.permutation(self.pairs)[: self.queries]
        given = np.stack([keys, values], 1).ravel()
        queries = np.stack([keys[asked], values[asked]], 1).ravel()
        tokens = np.zeros(self.length + 1, np.int64)
        tokens[: len(given) + len(queries)] = np.concatenate([given, queries])
        weights = np.zeros(self.length, np.float32)
        weights[len(given) : len(given) + len(queries) : 2] = 1.0  # label i is token i + 1
        return Sample(tokens, weights)
