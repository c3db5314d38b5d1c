"""Filters of datatrove, with its formulas and defaults. Words are split by one regular expression in all languages."""

import re
from collections.abc import Callable
from typing import Any

from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)
from datatrove.utils.word_tokenizers import WordTokenizer

from megatron.config.section import Section, key

from .contract import Removed, StageKind, Work

_WORDS = re.compile(r"\w+|[^\w\s]+")
_SENTENCES = re.compile(r"[^.!?]+[.!?]*")


class RegexWords(WordTokenizer):
    """Words are runs of word characters, or of other characters except white space. datatrove's own splitters need
    further packages, one per language."""

    def word_tokenize(self, text: str) -> list[str]:
        return _WORDS.findall(text)

    def sent_tokenize(self, text: str) -> list[str]:
        return [each.strip() for each in _SENTENCES.findall(text) if each.strip()]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        return [match.span() for match in _SENTENCES.finditer(text)]


class GopherQualitySection(Section):
    min_doc_words: int = key(50, "Least number of words.", ge=0)
    max_doc_words: int = key(100_000, "Largest number of words.", ge=1)
    min_stop_words: int = key(2, "Least number of different stop words.", ge=0)
    max_non_alpha_words_ratio: float = key(
        0.8, "Least share of words with a letter (datatrove's name of it).", ge=0, le=1
    )


class C4QualitySection(Section):
    filter_no_terminal_punct: bool = key(True, "Lines without an end of a sentence are cut out. FineWeb: false.")
    min_num_sentences: int = key(5, "Least number of sentences.", ge=0)
    min_words_per_line: int = key(3, "Lines with fewer words are cut out.", ge=0)


class NoSection(Section):
    pass


def _filter(made: Callable[..., Any]) -> Callable[[Any], Work]:
    def build(options: Section) -> Work:
        inner = made(language=RegexWords(), **options.model_dump())

        def work(document: Any) -> Removed | None:
            result = inner.filter(document)
            kept, reason = result if isinstance(result, tuple) else (result, "")
            return None if kept else Removed(reason or "removed")

        return work

    return build


C4_QUALITY = StageKind(C4QualitySection, work=_filter(C4QualityFilter))
GOPHER_QUALITY = StageKind(GopherQualitySection, work=_filter(GopherQualityFilter))
GOPHER_REPETITION = StageKind(NoSection, work=_filter(GopherRepetitionFilter))
FINEWEB_QUALITY = StageKind(NoSection, work=_filter(FineWebQualityFilter))
