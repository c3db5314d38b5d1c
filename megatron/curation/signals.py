"""RedPajama v2's quality signals, by their published names and formulas.

A signal of a document is a number, or None where it is undefined (a text without words). A signal of lines is a number
per line. Numbers are rounded to 8 digits, as published.
"""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property

_DELETED = str.maketrans("", "", string.punctuation)
_RAW_WORDS = re.compile(r"\w+|[^\w\s]+")
_LINES = re.compile(r"[^\n]*\n|[^\n]+$")
_SENTENCES = re.compile(r"\b[^.!?]+[.!?]*")
_LETTER = re.compile(r"[a-zA-Z]")
BULLETS = ("•", "‣", "▶", "◀", "◦", "■", "□", "▪", "▫", "–")
ELLIPSES = ("...", "…")


def normalised(text: str) -> str:
    """Without ASCII punctuation, in lower case, white space as single spaces, in Unicode's NFD form."""
    text = re.sub(r"\s+", " ", text.translate(_DELETED).lower().strip())
    return unicodedata.normalize("NFD", text)


class TextViews:
    """The views of a text that signals share, each made once."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def raw_words(self) -> list[str]:
        return _RAW_WORDS.findall(self.text)

    @cached_property
    def normal(self) -> str:
        return normalised(self.text)

    @cached_property
    def words(self) -> list[str]:
        return self.normal.split()

    @cached_property
    def lines(self) -> list[str]:
        """With their line ends, empty ones too."""
        return _LINES.findall(self.text)

    @cached_property
    def normal_lines(self) -> list[str]:
        return [normalised(each) for each in self.lines]

    @cached_property
    def characters(self) -> int:
        """Of all normalised words."""
        return sum(map(len, self.words))

    def ngrams(self, n: int) -> list[tuple[str, ...]]:
        return list(zip(*(self.words[first:] for first in range(n))))


def share(count: float, of: float) -> float | None:
    """A fraction, or None of nothing."""
    return round(count / of, 8) if of else None


def _top(n: int) -> Callable[[TextViews], float | None]:
    """The share of characters in the most common n-gram, overlapping ones counted each."""

    def signal(view: TextViews) -> float | None:
        common = Counter(view.ngrams(n)).most_common(1)
        if not common or common[0][1] <= 1:
            return 0.0
        gram, count = common[0]
        return share(count * sum(map(len, gram)), view.characters)

    return signal


def _duplicated(n: int) -> Callable[[TextViews], float | None]:
    """The share of characters in n-grams that occur at least twice, each character once."""

    def signal(view: TextViews) -> float | None:
        grams = view.ngrams(n)
        counts = Counter(grams)
        marked = {first + place for first, gram in enumerate(grams) if counts[gram] > 1 for place in range(n)}
        return share(sum(len(view.words[each]) for each in marked), view.characters) or 0.0

    return signal


def _entropy(view: TextViews) -> float | None:
    counts, total = Counter(view.words), len(view.words)
    if not total:
        return None
    return round(-sum(each / total * math.log(each / total) for each in counts.values()), 8)


def _symbols(view: TextViews) -> float | None:
    count = view.text.count("#") + sum(map(view.text.count, ELLIPSES))
    return share(count, len(view.raw_words))


def _no_letters(view: TextViews) -> float | None:
    if not view.raw_words:
        return None
    return round(1 - sum(bool(_LETTER.search(each)) for each in view.raw_words) / len(view.raw_words), 8)


def _ellipsis_lines(view: TextViews) -> float | None:
    return share(sum(each.rstrip().endswith(ELLIPSES) for each in view.lines), len(view.lines))


DOCUMENT: dict[str, Callable[[TextViews], float | None]] = {
    "rps_doc_num_sentences": lambda view: len(_SENTENCES.findall(view.text)),
    "rps_doc_word_count": lambda view: len(view.words),
    "rps_doc_mean_word_length": lambda view: share(view.characters, len(view.words)),
    "rps_doc_symbol_to_word_ratio": _symbols,
    "rps_doc_frac_lines_end_with_ellipsis": _ellipsis_lines,
    "rps_doc_frac_no_alph_words": _no_letters,
    "rps_doc_frac_unique_words": lambda view: share(len(set(view.words)), len(view.words)),
    "rps_doc_unigram_entropy": _entropy,
    "rps_doc_frac_all_caps_words": lambda view: share(sum(map(str.isupper, view.raw_words)), len(view.raw_words)),
    **{f"rps_doc_frac_chars_top_{n}gram": _top(n) for n in (2, 3, 4)},
    **{f"rps_doc_frac_chars_dupe_{n}grams": _duplicated(n) for n in range(5, 11)},
    "rps_doc_lorem_ipsum": lambda view: share(view.normal.count("lorem ipsum"), len(view.normal)) or 0.0,
    "rps_doc_curly_bracket": lambda view: share(view.text.count("{") + view.text.count("}"), len(view.text)) or 0.0,
}
LINES: dict[str, Callable[[TextViews], list[float]]] = {
    "rps_lines_javascript_counts": lambda view: [float(each.split().count("javascript")) for each in view.normal_lines],
    "rps_lines_ending_with_terminal_punctution_mark": lambda view: [
        float(each.rstrip().endswith((".", "!", "?", "”"))) for each in view.lines
    ],
    "rps_lines_num_words": lambda view: [float(len(each.split())) for each in view.normal_lines],
    "rps_lines_uppercase_letter_fraction": lambda view: _per_line(view.lines, str.isupper),
    "rps_lines_numerical_chars_fraction": lambda view: _per_line(view.normal_lines, str.isnumeric),
    "rps_lines_start_with_bulletpoint": lambda view: [float(each.lstrip().startswith(BULLETS)) for each in view.lines],
}


def _per_line(lines: Iterable[str], kind: Callable[[str], bool]) -> list[float]:
    return [round(sum(map(kind, each)) / len(each), 8) if each else 0.0 for each in lines]
