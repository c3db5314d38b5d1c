"""Signals of Zyda and of RedPajama v1's code, by their published formulas, and counts of a user's own terms.

All are functions of the raw text. Zyda divides some counts by the length of the text after its transform, in which long
runs of a character are one character.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from .signals import TextViews, share

# Zyda's lengths from which a run of a character becomes one character, in its order.
RUNS = {
    "-": 10,
    " ": 40,
    "_": 10,
    "/": 10,
    "\\": 10,
    "\n": 10,
    "\t": 20,
    "\r": 10,
    ".": 10,
    ",": 10,
    ":": 10,
    "?": 10,
    "\xa0": 10,
}
_WORD_ENDS = re.compile(r"\s|-|/|\\|\.")


def collapsed(runs: Mapping[str, int]) -> Callable[[str], str]:
    """A function that makes long runs of a character one character."""
    if not runs:
        return lambda text: text
    found = re.compile("|".join(f"(?:{re.escape(each)}){{{length},}}" for each, length in runs.items()))
    return lambda text: found.sub(lambda match: match[0][0], text)


_transformed = collapsed(RUNS)
Signal = Callable[[TextViews], float | None]


def _count(pattern: str) -> Signal:
    found = re.compile(pattern)
    return lambda view: len(found.findall(view.text))


def _per_character(pattern: str) -> Signal:
    """Matches in the raw text, divided by the length of the transformed one."""
    found = re.compile(pattern)
    return lambda view: share(len(found.findall(view.text)), len(_transformed(view.text)))


def _fraction(pattern: str) -> Signal:
    found = re.compile(pattern)
    return lambda view: share(len(found.findall(view.text)), len(view.text))


def _mean_word(view: TextViews) -> float | None:
    """Empty words between two separators count too, as in Zyda."""
    words = _WORD_ENDS.split(view.text)
    return share(sum(map(len, words)), len(words))


def _mean_line(view: TextViews) -> float | None:
    lines = view.text.splitlines()
    return share(sum(map(len, lines)), len(lines))


OTHER: dict[str, Signal] = {
    "zyda_length": lambda view: len(_transformed(view.text)),
    "zyda_mean_word_length": _mean_word,
    "zyda_fraction_non_alphanumeric": _fraction(r"[^\w\s]"),
    "zyda_fraction_numerical": _fraction(r"\d"),
    "zyda_repeated_characters": lambda view: len(re.findall(r"(\w)\1{6,}", _transformed(view.text))),
    "zyda_xml_count": _count("xml"),
    "zyda_xml_declarations": _count(r"<?xml version="),  # in Zyda the first two characters are a pattern too
    "zyda_lorem_ipsum_count": _count("lorem ipsum"),
    "zyda_https_per_character": _per_character("https://"),
    "zyda_angle_brackets_per_character": _per_character("<"),
    "zyda_json_keys_per_character": _per_character('":'),
    "zyda_www_per_character": _per_character("www."),  # likewise: any character in place of the full stop
    "code_longest_line": lambda view: max(map(len, view.text.splitlines()), default=None),
    "code_mean_line": _mean_line,
    "code_alphanumeric_fraction": lambda view: share(sum(map(str.isalnum, view.text)), len(view.text)),
}


def list_signals(name: str, terms: list[str]) -> dict[str, Signal]:
    """Signals of a list of terms: as words, as RedPajama v2 counts them, and as parts of the raw text, as Zyda does."""
    known = {tuple(each.split()) for each in terms}
    lengths, single = sorted({len(each) for each in known}), frozenset(terms)

    def ngrams(view: TextViews) -> float:
        return sum(gram in known for length in lengths for gram in view.ngrams(length))

    def count(view: TextViews) -> int:
        return sum(map(view.text.count, terms))

    return {
        f"list.{name}.words": ngrams,
        f"list.{name}.word_fraction": lambda view: share(
            sum(each in single for each in view.raw_words), len(view.raw_words)
        ),
        f"list.{name}.count": count,
        f"list.{name}.per_character": lambda view: share(count(view), len(_transformed(view.text))),
    }
