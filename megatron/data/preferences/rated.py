"""Rated answers from token files: each document is an answer behind its prompt, and a number says whether it is good.

A sample has one answer. Labels weigh one over their number in it, so that all answers count equally. With `mismatched`
there is a document n in which another prompt's answer follows the prompt of answer n (`deepy data mismatch` makes
them). It is the probe of a sample: an objective reads it before the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import numpy as np

from megatron.config import Config
from megatron.config.file_access import keep_inputs
from megatron.config.problems import UserError

from ..errors import DataError
from ..manifest import keep_others
from ..sample import IGNORED, Sample
from ..token_file import TokenFile, prefix_of, with_ending
from ..token_writer import TokenFileWriter
from .answers import ENDINGS, Answers, answers_of, check_lengths, numbers_of, options_of, order_of, sample_of

REWARD = "reward"  # a column
KEYS = frozenset(f"{name}{ending}" for name in ("answers", "mismatched") for ending in ENDINGS) | {"rewards"}


class Rated:
    """Answers in a new order for each pass.

    Args:
        rewards: [documents], or None in a set that is only evaluated.
        mismatched: document n belongs to answer n.
        length: S.
        filler: id of added tokens.

    Raises:
        DataError: files do not match, or a document has more than S + 1 tokens.
    """

    masked = True

    def __init__(
        self,
        answers: Answers,
        rewards: np.ndarray | None,
        mismatched: Answers | None,
        seed: int,
        length: int,
        filler: int,
    ):
        self.answers, self.rewards, self.mismatched = answers, rewards, mismatched
        self.seed, self.length, self.filler = seed, length, filler
        if not len(answers):
            raise DataError(answers.path, "it must have a document", "use a file of answers")
        check_lengths(answers.sizes, length, "answers")
        if mismatched is not None:
            if len(mismatched) != len(answers):
                rule = f"it has {len(mismatched)} documents, answers has {len(answers)}"
                raise DataError(mismatched.path, rule, "make it from these answers by deepy data mismatch")
            again = f"make them again by deepy data mismatch --longest {length + 1}"
            check_lengths(mismatched.sizes, length, "mismatched answers", shorter=again)
            if (mismatched.labels is None) != (answers.labels is None):
                fix = "give answers_labels and mismatched_labels, or neither"
                raise DataError(mismatched.path, "both files of answers must have labels, which mask prompts", fix)

    @classmethod
    def build(cls, config: Config, name: str) -> Self:
        """Read `data.options`: `answers`, `rewards`, `mismatched`, and optional keys with the endings `_labels` and
        `_reference`. Its key `validation` has `answers` and `answers_labels` of the validation set.

        Raises:
            UserError: an option is missing or unknown.
        """
        options = options_of(config.data.options, name, KEYS)
        answers, rewards = answers_of(options, "answers"), options.get("rewards")
        if name == "train" and not isinstance(rewards, str):
            raise UserError("data.options.rewards must be the path of the answers' rewards, a .npy file")
        mismatched = answers_of(options, "mismatched") if "mismatched" in options else None
        if mismatched is not None and (mismatched.reference is None) != (answers.reference is None):
            raise UserError("data.options must have answers_reference and mismatched_reference, or neither")
        numbers = read_rewards(rewards, len(answers)) if isinstance(rewards, str) else None
        sizes = (config.training.sequence_length, config.tokenizer.eod_id or 0)
        return cls(answers, numbers, mismatched, config.data.seed, *sizes)

    def _document(self, number: int) -> int:
        epoch, place = divmod(number, len(self.answers))
        return int(order_of(self.seed, "rated", epoch, len(self.answers))[place])

    def sample(self, number: int) -> Sample:
        """Sample n: tokens int64 [S+1], weights, documents, and the columns `sequence`, `reference` and `reward`."""
        document = self._document(number)
        made = sample_of([(self.answers, document)], self.length, self.filler)
        if self.rewards is None:
            return made
        reward = np.full(self.length, self.rewards[document], np.float32)
        return replace(made, columns={**(made.columns or {}), REWARD: reward})

    def probe(self, number: int) -> Sample:
        """The mismatched answer to the prompt of sample n.

        Raises:
            UserError: there are none.
        """
        if self.mismatched is None:
            raise UserError("data.options.mismatched must be there: deepy data mismatch makes it")
        return sample_of([(self.mismatched, self._document(number))], self.length, self.filler)


def read_rewards(path: str, documents: int) -> np.ndarray:
    """One number for each document: a .npy file, or a token file of GPT-NeoX with one id per document.

    Raises:
        DataError: it has others.
    """
    if path.endswith(".npy") or not with_ending(path, ".idx").exists():
        return numbers_of(path, documents, "document")
    file = TokenFile(path)
    if len(file) != documents or not (file.sizes == 1).all():
        rule = f"it must have {documents} documents of one number, and has {len(file)} of {file.tokens} numbers"
        raise DataError(path, rule, "make it from the same records as the token file")
    return np.concatenate([file[number] for number in range(documents)]).astype(np.float32)


def write_mismatched(
    answers: str, labels: str, output: str, longest: int | None = None, overwrite: bool = False
) -> int:
    """Write the documents of `mismatches`, and their labels under `output`_labels. Returns the number of documents.

    Raises:
        DataError: an input cannot be used, or an output is there already.
    """
    given, marks = Answers(answers, labels), f"{prefix_of(output)}_labels"
    assert given.labels is not None
    for prefix in (output, marks):
        keep_others(prefix_of(prefix))
        keep_inputs([with_ending(prefix_of(prefix), ".bin")], [given.tokens.bin_path, given.labels.bin_path])
        if (index := with_ending(prefix_of(prefix), ".idx")).exists() and not overwrite:
            raise DataError(index, "it must not exist yet", "use another --output, or --overwrite")
    with TokenFileWriter(output, given.tokens.dtype) as ids, TokenFileWriter(marks, np.int32) as targets:
        for prompt, answer, partner in mismatches(given):
            room = None if longest is None else max(0, longest - len(prompt))
            if room == 0:
                raise DataError(answers, f"a prompt has {len(prompt)} tokens", "use a larger --longest, or remove it")
            ids.append(np.concatenate([prompt, answer[:room]]))
            own = given.labels[partner][-len(answer) :][:room]
            targets.append(np.concatenate([np.full(len(prompt), IGNORED), own]))
    return len(given)


def mismatches(answers: Answers) -> Sequence[tuple[np.ndarray, np.ndarray, int]]:
    """For each answer its prompt, the answer of the next document with another prompt, and that document.

    Raises:
        DataError: there is one prompt only, or an answer has no labels.
    """
    cuts, prompts = [], []
    for number in range(len(answers)):
        counts = answers.counts(number)
        if not counts.any():
            rule = f"document {number} has no label that counts"
            raise DataError(answers.path, rule, "give the label file, which separates prompts from answers")
        cuts.append(int(counts.argmax()))
        prompts.append(answers.tokens[number][: cuts[-1]])
    keys = [each.tobytes() for each in prompts]
    if len(set(keys)) < 2:
        raise DataError(answers.path, "its answers must have different prompts", "use answers to two prompts or more")
    partners, partner = [0] * len(keys), 0
    for number in reversed(range(2 * len(keys))):  # the second pass around ends at the partners of the last ones
        here, there = number % len(keys), (number + 1) % len(keys)
        partner = there if keys[here] != keys[there] else partner
        partners[here] = partner
    return [(prompts[n], answers.tokens[partner][cuts[partner] :], partner) for n, partner in enumerate(partners)]
