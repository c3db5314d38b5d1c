"""Units of n-grams: the words of a text, or its tokens. Each has a number. Units of no example have 0."""

import re
import string
import sys
import unicodedata
from functools import cache

import numpy as np

from megatron.data.text_search import table_of, tokens_of
from megatron.data.token_file import TokenFile
from megatron.data.tokenizer import Tokenizer

NO_SPACE = re.compile(r"\S+")


@cache
def _punctuation() -> dict[int, None]:
    """For str.translate: Unicode's punctuation, and ASCII's other marks (`$+<=>^|~` and the backquote)."""
    marks = (each for each in range(sys.maxunicode + 1) if unicodedata.category(chr(each)).startswith("P"))
    return dict.fromkeys([*marks, *map(ord, string.punctuation)])


def words(text: str) -> list[str]:
    """A text's words without case and punctuation, as in GPT-3's comparison."""
    return text.lower().translate(_punctuation()).split()


class Tokens:
    """Token ids, compared as they are.

    Attributes:
        largest: the largest number in an example.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._numbers = np.zeros(tokenizer.size, np.int32)
        self.largest = 0

    def example(self, text: str) -> np.ndarray:
        """The numbers of an example, int32, with new numbers for new units."""
        ids = np.array(self._tokenizer.encode(text), np.int64)
        new = np.unique(ids[self._numbers[ids] == 0])
        self._numbers[new] = np.arange(1, len(new) + 1) + self.largest
        self.largest += len(new)
        return self._numbers[ids]

    def document(self, ids: np.ndarray) -> np.ndarray:
        """The numbers of a document of token ids, int32, 0 for units of no example."""
        known = (ids >= 0) & (ids < len(self._numbers))  # a padded vocabulary has more
        return np.where(known, self._numbers[np.where(known, ids, 0)], 0).astype(np.int32)

    def spans(self, ids: np.ndarray, places: np.ndarray, n: int) -> np.ndarray:
        """The tokens of the n units from each position: int64 [places, 2], first and one past the last."""
        return np.stack([places, places + n], axis=1)


class Words:
    """Words of the text of tokens, for any cut into tokens, with the methods of `Tokens`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._numbers = tokenizer, dict[str, int]()
        self._table: list[bytes] | None = None

    @property
    def largest(self) -> int:
        return len(self._numbers)

    def open(self, file: TokenFile) -> None:
        """Use the documents of another file."""
        table, end = table_of(file, self._tokenizer), self._tokenizer.eod_id
        if table is not None and end is not None:
            table = [*table]
            table[end] = b" "  # it is no part of the last word
        self._table = table

    def example(self, text: str) -> np.ndarray:
        return np.array([self._numbers.setdefault(each, len(self._numbers) + 1) for each in words(text)], np.int32)

    def document(self, ids: np.ndarray) -> np.ndarray:
        known = self._numbers
        found = [known.get(each, 0) for each in words(self._text(ids))]
        return np.array(found, np.int32)

    def _text(self, ids: np.ndarray) -> str:
        if self._table is None:
            return self._tokenizer.decode(self._own(ids))
        return b"".join(map(self._table.__getitem__, ids.tolist())).decode("utf-8", "surrogateescape")

    def _own(self, ids: np.ndarray) -> list[int]:
        end = self._tokenizer.eod_id
        return (ids[:-1] if len(ids) and ids[-1] == end else ids).tolist()

    def spans(self, ids: np.ndarray, places: np.ndarray, n: int) -> np.ndarray:
        text = self._text(ids)
        bounds = [match.span() for match in NO_SPACE.finditer(text) if words(match[0])]
        cuts = np.array([(bounds[place][0], bounds[place + n - 1][1]) for place in places.tolist()])
        if self._table is None:
            own = self._own(ids)
            return np.array([tokens_of(self._tokenizer, own, begin, end) for begin, end in cuts.tolist()])
        sizes = np.fromiter((len(each.encode("utf-8", "surrogateescape")) for each in text), np.int64, len(text))
        bytes_before = np.concatenate([[0], np.cumsum(sizes)])
        table = self._table
        ends = np.cumsum([len(table[each]) for each in ids.tolist()])
        first = np.searchsorted(ends, bytes_before[cuts[:, 0]], side="right")
        last = np.searchsorted(ends, bytes_before[cuts[:, 1]], side="left")
        return np.stack([first, last + 1], axis=1)
