"""RedPajama v2's quality signals, by their published names and formulas.

A signal of a document is a number, or None where it is undefined (a text without words). A signal of lines is a number
per line. Numbers are rounded to 8 digits, as published.

Also signals of Zyda and of RedPajama v1's code, by their published formulas, and counts of a user's own terms. All are
functions of the raw text. Zyda divides some counts by the length of the text after its transform, in which long runs
of a character are one character."""

import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
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


DOCUMENT: dict[str, Callable[[TextViews], float | None]] = {
    "rps_doc_num_sentences": lambda view: len(_SENTENCES.findall(view.text)),
    "rps_doc_word_count": lambda view: len(view.words),
    "rps_doc_mean_word_length": lambda view: share(view.characters, len(view.words)),
    "rps_doc_symbol_to_word_ratio": _symbols,
    "rps_doc_frac_lines_end_with_ellipsis": lambda view: share(
        sum(each.rstrip().endswith(ELLIPSES) for each in view.lines), len(view.lines)
    ),
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
