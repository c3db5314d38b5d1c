"""Decontamination: documents that share n-grams of words with an evaluation set."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from megatron.config.problems import Problem
from megatron.config.section import Section, key
from megatron.data.errors import DataError
from megatron.data.overlap.search import NgramIndex, read_examples
from megatron.data.overlap.units import words

from .contract import Noted, Removed, StageKind, Work
from .texts import one_file


class DecontaminateSection(Section):
    file: str = key(..., "The evaluation set: JSON lines (.jsonl), or a text whose paragraphs are the examples.")
    fields: list[str] = key(
        list, "Of JSON lines, the keys whose texts are joined. Default: text, or context and continuation."
    )
    action: Literal["remove", "report"] = key(
        "remove", "report: the document is kept and counted, with the example in its metadata."
    )
    n: int = key(13, "Words of an n-gram that a document must not share with an example.", ge=1)


def _decontaminate(options: DecontaminateSection) -> Work:
    examples = read_examples(options.file, tuple(options.fields))
    numbers: dict[str, int] = {}
    sequences = [
        np.array([numbers.setdefault(each, len(numbers) + 1) for each in words(text)], np.int32) for _, text in examples
    ]
    index = NgramIndex(sequences, options.n, len(numbers))
    first_with = {row: name for (name, _), rows in reversed(list(zip(examples, index.of))) for row in rows.tolist()}

    def work(document: Any) -> Removed | Noted | None:
        known = np.array([numbers.get(each, 0) for each in words(document.text)], np.int32)
        places, rows = index.find(known)
        if not len(places):
            return None
        reason, example = "shares an n-gram with an example", first_with[int(rows[0])]
        if options.action == "remove":
            return Removed(reason, f"example {example}")
        document.metadata["overlap"] = example
        return Noted(reason)

    return work


def _rules(options: DecontaminateSection, path: str, where: str) -> Iterable[Problem]:
    try:
        examples = read_examples(options.file, tuple(options.fields))
    except DataError as error:
        yield Problem(
            f"{path}.file", f"{path}.file must be an evaluation set: {error}", "check it", options.file, where
        )
        return
    if not any(len(words(text)) >= options.n for _, text in examples):
        rule = f"{path}.n must be at most the number of words of some example, and no example has {options.n}"
        yield Problem(f"{path}.n", rule, "use a smaller n", options.n, where)


DECONTAMINATE = StageKind(DecontaminateSection, work=_decontaminate, rules=_rules, files=one_file)
