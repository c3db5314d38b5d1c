"""The language of a text: by a fastText model, or by common words and alphabets where there is none."""

import re
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from megatron.config.file_access import unreadable
from megatron.config.problems import Problem
from megatron.config.section import Section, key

from .contract import Removed, StageKind, Work

_WORDS = re.compile(r"[^\W\d_]+")
_PREFIX = "__label__"
FASTTEXT = (".bin", ".ftz")


class LanguageSection(Section):
    keep: list[str] = key(list, "Languages of documents that are kept, by their codes (en, de). Empty: all.")
    least: float = key(0.65, "A document whose language has a smaller score is removed.", ge=0, le=1)
    model: str | None = key(
        None, "A fastText model, such as lid.176.bin. Without one: lists of common words and alphabets of 21 languages."
    )


@cache
def _profiles() -> tuple[dict[str, frozenset[str]], dict[str, re.Pattern[str]]]:
    found = yaml.safe_load(Path(__file__).with_name("languages.yml").read_text(encoding="utf-8"))
    words = {str(name): frozenset(each.split()) for name, each in found["words"].items()}
    return words, {str(name): re.compile(f"[{each}]") for name, each in found["letters"].items()}


def by_words(text: str) -> tuple[str, float]:
    """The language whose common words, or whose letters, a text has most of, and a score.

    The score of an alphabet is its share of the letters. The score of common words is a / (a + b), for the counts a and
    b of the best two languages. ("und", 0) without any."""
    lists, letters = _profiles()
    words = _WORDS.findall(text.lower())
    total = sum(map(len, words))
    shares = {name: len(each.findall(text)) for name, each in letters.items()}
    if shares["ja"]:  # which is written with Chinese characters too
        shares["ja"] += shares.pop("zh")
    name = max(shares, key=lambda each: shares[each])
    if 2 * shares[name] > total:
        return name, min(shares[name] / total, 1.0)
    counts = sorted(((sum(each in known for each in words), name) for name, known in lists.items()), reverse=True)
    (most, best), (second, _) = counts[:2]
    return (best, most / (most + second)) if most else ("und", 0.0)


def fasttext_model(path: str) -> Callable[[str], dict[str, float]]:
    """The probabilities of all labels that a fastText model gives a text. Line ends are spaces to it."""
    model = import_module("fasttext").load_model(path)

    def probabilities(text: str) -> dict[str, float]:
        # The bound function: the method around it fails with NumPy 2 in some releases.
        found = model.f.predict(" ".join(text.split("\n")) + "\n", -1, 0.0, "strict")
        return {label.removeprefix(_PREFIX): min(float(value), 1.0) for value, label in found}

    return probabilities


def _by_model(path: str) -> Callable[[str], tuple[str, float]]:
    probabilities = fasttext_model(path)

    def best(text: str) -> tuple[str, float]:
        found = probabilities(text)
        name = max(found, key=lambda each: (found[each], each))
        return name, found[name]

    return best


def _language(options: LanguageSection) -> Work:
    find = _by_model(options.model) if options.model else by_words

    def work(document: Any) -> Removed | None:
        name, score = find(document.text)
        document.metadata |= {"language": name, "language_score": round(score, 6)}
        if options.keep and name not in options.keep:
            return Removed("its language is not kept", f"{name} {score:.2f}")
        return (
            Removed(f"language score below {options.least:g}", f"{name} {score:.2f}") if score < options.least else None
        )

    return work


def fasttext_problems(file: str, path: str, where: str) -> Iterable[Problem]:
    if not file.endswith(FASTTEXT):
        yield Problem(path, f"{path} must be a fastText model, .bin or .ftz", "give such a file", file, where)
    elif why := unreadable(file):
        yield Problem(path, f"{path} must be a readable file: {why}", "check the path", file, where)
    elif find_spec("fasttext") is None:
        rule = f"{path} must be read with the package fasttext, which is not installed"
        yield Problem(path, rule, "pip install fasttext, or fasttext-numpy2-wheel", file, where)


def _rules(options: LanguageSection, path: str, where: str) -> Iterable[Problem]:
    if options.model is not None:
        yield from fasttext_problems(options.model, f"{path}.model", where)
        return
    words, letters = _profiles()
    for each in options.keep:
        if each not in words and each not in letters:
            rule = f"{path}.keep must be of {', '.join([*words, *letters])}, unless there is a model"
            yield Problem(f"{path}.keep", rule, "give a fastText model: model: lid.176.bin", each, where)


def _files(options: LanguageSection) -> list[str]:
    return [options.model] if options.model else []


LANGUAGE = StageKind(LanguageSection, work=_language, rules=_rules, files=_files)
