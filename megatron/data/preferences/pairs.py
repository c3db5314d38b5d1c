"""Preference pairs from token files: document n of two files is the chosen and the rejected answer to one prompt.

A sample has one pair as two documents, the chosen one first, and is filled up with labels that do not count. Labels
weigh one over their number in the pair, so that all pairs count equally. The first token of a document is no label.

Rated answers: each document is an answer behind its prompt, and a number says whether it is good. A sample has one
answer. With `mismatched` there is a document n in which another prompt's answer follows the prompt of answer n (`deepy
data mismatch` makes them). It is the probe of a sample: an objective reads it before the step."""

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
from ..token_file import TokenFile, TokenFileWriter, prefix_of, with_ending
from .answers import ENDINGS, Answers, answers_of, check_lengths, numbers_of, options_of, order_of, sample_of

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


REWARD_KEYS = frozenset({*SIDES, *(f"{side}_labels" for side in SIDES), "margins"})


class RewardPairs(Pairs):
    """The pairs of `Pairs`. Both values weigh a half. GPT-NeoX's label files have one label in each answer."""

    keys = REWARD_KEYS
    spare = 1  # the last token of a pair is an input too
    margins: np.ndarray | None = None  # one number for each pair, or None

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


REWARD = "reward"  # a column
RATED_KEYS = frozenset(f"{name}{ending}" for name in ("answers", "mismatched") for ending in ENDINGS) | {"rewards"}


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
        options = options_of(config.data.options, name, RATED_KEYS)
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
