"""Prompts of training and of evaluations, from a file or an environment. Prompt n is a function of n only."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config import Config
from megatron.config.file_access import parse_json, read_plain
from megatron.config.problems import UserError
from megatron.config.registry import load
from megatron.data.chat.encode import BadConversation, find_template
from megatron.data.errors import DataError
from megatron.data.hashing import generator, key_of
from megatron.data.preferences.answers import Answers
from megatron.data.token_file import prefix_of, with_ending
from megatron.data.tokenizer import Tokenizer

from .environments import problem
from .options import ENVIRONMENTS, align_of

HELD_OUT = 8  # one of n problems of an environment is for evaluations only
TRIES = 10_000  # draws of a problem until it is one of its set


@dataclass(frozen=True)
class Prompt:
    """Ids and text of a prompt, and the record that rewards read."""

    ids: tuple[int, ...]
    text: str
    record: Mapping[str, Any]


class Problems:
    """The prompts of a run.

    Args:
        held_out: prompts of evaluations. An environment's are no problems of training: a hash of the prompt decides.

    Attributes:
        digest: hash of a file's records. Empty with an environment.

    Raises:
        DataError: a file is missing, or has a prompt that is none or too long.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, held_out: bool = False) -> None:
        self.config, self.tokenizer, self.own, self.held_out = config, tokenizer, align_of(config), held_out
        self.environment, self.digest = None, ""
        if self.own.environment is not None:
            self.environment = load(ENVIRONMENTS.get(self.own.environment, self.own.environment))
            return
        path = Path((self.own.held_out if held_out else self.own.prompts) or "")
        records: Sequence[Any]
        if with_ending(prefix_of(path), ".idx").exists():
            records = list(_documents(path, self.own.held_out_labels if held_out else self.own.prompt_labels))
            self.found = [self._of_tokens(f"{path}, document {n}", *each) for n, each in enumerate(records)]
        else:
            records = _records(path)
            self.found = [self._checked(f"{path}:{line}", record) for line, record in records]
        self.digest = hashlib.sha256(json.dumps(records).encode()).hexdigest()
        if not self.found:
            raise DataError(path, "it must have a prompt", "write one JSON document per line")

    def __call__(self, number: int, level: int | None = None) -> Prompt:
        """Prompt n. The problems of an environment are at most as difficult as the level."""
        seed = self.config.training.seed
        if self.environment is None:
            epoch, place = divmod(number, len(self.found))
            return self.found[place if self.held_out else int(_order(seed, epoch, len(self.found))[place])]
        levels = (self.own.difficulty[0], self.own.difficulty[1] if level is None else level)
        for attempt in range(TRIES):
            record = problem(self.environment, levels, seed, "problem", number, int(self.held_out), attempt)
            if (key_of(str(record["prompt"])) % HELD_OUT == 0) == self.held_out:
                return self._checked(f"align.environment {self.own.environment}", record)
        raise UserError(f"align.environment: {TRIES} problems are all of one set. Use more difficulties")

    def _checked(self, origin: str, record: Mapping[str, Any]) -> Prompt:
        text = record.get("prompt")
        if "messages" in record:
            try:
                template = find_template(self.config.tokenizer.path or "", self.own.template, {})
                text = template.prompt(record["messages"])
            except BadConversation as error:
                raise DataError(origin, str(error), "correct the record") from error
        if not isinstance(text, str) or not text:
            raise DataError(origin, "it must have a text as prompt, or messages", "correct the record")
        try:
            text.encode()  # half a pair of UTF-16 is no text
            ids = tuple(self.tokenizer.encode(text))
            json.dumps(record)
        except UnicodeError as error:
            raise DataError(origin, f"its prompt must be text of UTF-8: {error}", "correct the record") from error
        except (TypeError, ValueError) as error:
            rule = f"its entries must be values of JSON, which rewards get: {error}"
            raise DataError(origin, rule, "correct the record") from error
        rest = {name: value for name, value in record.items() if name not in ("prompt", "messages")}
        return self._fitting(origin, Prompt(ids, text, rest))

    def _of_tokens(self, origin: str, prompt: list[int], answer: list[int]) -> Prompt:
        """A prompt of a token file. Its ids are read as they are."""
        if (largest := max(*prompt, *answer, 0)) >= self.tokenizer.size:
            rule = f"its ids must be below the tokenizer's {self.tokenizer.size}, and one is {largest}"
            raise DataError(origin, rule, "give the tokenizer that made the file")
        text = self.tokenizer.decode([each for each in answer if each != self.tokenizer.eod_id])
        return self._fitting(origin, Prompt(tuple(prompt), self.tokenizer.decode(prompt), {"answer": text}))

    def _fitting(self, origin: str, prompt: Prompt) -> Prompt:
        ids, most = prompt.ids, self.config.training.sequence_length + 1 - self.own.tokens
        if not 0 < len(ids) <= most:
            rule = f"its prompt has {len(ids)} tokens, and must have 1 to {most}"
            raise DataError(origin, rule, "remove it, use a longer training.sequence_length or a smaller align.tokens")
        return prompt


def _documents(path: Path, labels: str | None) -> Iterator[tuple[list[int], list[int]]]:
    """The ids of each document before its first label, and the ids of its first run of labels.

    Raises:
        DataError: the files do not match, or a document has no labels.
    """
    if labels is None:
        raise DataError(path, "a token file of prompts must come with its label file", "give align.prompt_labels")
    file = Answers(str(path), labels)
    for number in range(len(file)):
        counts, ids = file.counts(number), file.tokens[number].tolist()
        if not counts.any():
            raise DataError(labels, f"document {number} has no label that counts", "remove the document")
        begin = int(counts.argmax())
        yield ids[:begin], ids[begin : begin + int(np.append(~counts[begin:], True).argmax())]


def _records(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """The line number and the document of each line.

    Raises:
        DataError: the file cannot be read, or a line is no JSON object.
    """
    try:
        lines = read_plain(path).decode("utf-8").split("\n")
    except (OSError, UnicodeError) as error:
        raise DataError(path, f"prompts cannot be read: {error}", "correct align.prompts") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise DataError(f"{path}:{number}", "it must be a JSON object", "write one per line")
        found.append((number, record))
    return found


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    return generator(seed, "prompts", epoch).permutation(count)
