"""Search token files for the n-grams of all examples in one pass, and find the steps of a run that read them.

The examples' n-grams are in memory, and one piece of a token file at a time, so memory does not grow with the files."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron.config.file_access import parse_json
from megatron.data.corpus.job import in_order
from megatron.data.errors import DataError
from megatron.data.plan import SyntheticPlan
from megatron.data.provenance import Provenance
from megatron.data.text_search import document_bounds
from megatron.data.token_file import TokenFile
from megatron.data.tokenizer import Tokenizer

from .units import Tokens, Words

FORMS = (("text",), ("context", "continuation"))  # default fields
BLANK = re.compile(r"\n[ \t]*\n")


def read_examples(path: str | Path, fields: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """Names and texts: the objects of a file of JSON lines (`.jsonl`), or the paragraphs of any other text.

    Args:
        fields: of an object, whose texts are joined by spaces. Default: `text`, or `context` and `continuation`.

    Raises:
        DataError: the file cannot be read, or a line is no such object.
    """
    try:
        content = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(path, f"it must be a readable file in UTF-8: {error}", "give another one") from error
    if Path(path).suffix != ".jsonl":
        parts = [part.strip() for part in BLANK.split(content)]
        return [(str(number), part) for number, part in enumerate((part for part in parts if part), 1)]
    lines = enumerate(content.split("\n"), 1)
    return [(str(number), _text(line, f"{path}:{number}", fields)) for number, line in lines if line.strip()]


def _text(line: str, where: str, fields: tuple[str, ...]) -> str:
    try:
        value = parse_json(line)
    except ValueError as error:
        raise DataError(where, f"it must be a JSON object: {error}", "fix the line") from error
    forms = (fields,) if fields else FORMS
    form = next((form for form in forms if isinstance(value, dict) and all(name in value for name in form)), None)
    if form is None:
        wanted = " or ".join(" and ".join(map(repr, form)) for form in forms)
        has = ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__
        raise DataError(where, f"it must have {wanted}, and has {has}", "name the fields: --fields question,answer")
    if not all(isinstance(value[name], str) for name in form):
        raise DataError(where, f"{' and '.join(form)} must be text", "name other fields: --fields question,answer")
    return " ".join(value[name] for name in form)


BLOCK = 1 << 16  # positions that are hashed together
FILTER_BITS = 22  # of a hash. A table marks their values that occur, so most positions need no search


class NgramIndex:
    """The distinct n-grams of sequences of numbers, sorted by hash.

    Hashes only find candidates. Each is compared with the n-gram number by number, so results are exact. Memory: 4n + 8
    bytes for each, and 4 MiB.

    Args:
        sequences: int32 arrays of numbers from 1 to `largest`.
        n: numbers in an n-gram.

    Attributes:
        grams: int32 [count, n].
        of: for each sequence, the row of each of its n-grams, in order. Empty if it is shorter than n.
    """

    def __init__(self, sequences: Sequence[np.ndarray], n: int, largest: int) -> None:
        self.n = n
        lengths = [max(len(each) - n + 1, 0) for each in sequences]
        windows = [np.lib.stride_tricks.sliding_window_view(each, n) for each in sequences if len(each) >= n]
        every = np.concatenate(windows) if windows else np.empty((0, n), np.int32)
        for seed in range(64):  # until no two n-grams have the same hash
            self._draw(seed, largest)
            self.hashes, first, inverse = np.unique(self._hash(every), return_index=True, return_inverse=True)
            self.grams = every[first]
            if all(
                np.array_equal(every[at : at + BLOCK], self.grams[inverse[at : at + BLOCK]])
                for at in range(0, len(every), BLOCK)
            ):
                break
        else:
            raise AssertionError("64 hash functions in a row have collided, which cannot be chance")
        self.of = np.split(inverse.astype(np.int64), np.cumsum(lengths)[:-1]) if sequences else []
        self._occurs = np.zeros(1 << FILTER_BITS, bool)
        self._occurs[self.hashes >> np.uint64(64 - FILTER_BITS)] = True

    def __len__(self) -> int:
        return len(self.grams)

    def _draw(self, seed: int, largest: int) -> None:
        """Draw a hash function: the sum of the numbers' random values, each times an odd factor of its position."""
        generator = np.random.Generator(np.random.PCG64(seed))
        self._values = generator.integers(0, 1 << 64, largest + 1, np.uint64)
        self._factors = generator.integers(0, 1 << 64, self.n, np.uint64) | np.uint64(1)

    def _hash(self, grams: np.ndarray) -> np.ndarray:
        total = np.zeros(len(grams), np.uint64)
        for place in range(self.n):
            total += self._values[grams[:, place]] * self._factors[place]
        total ^= total >> np.uint64(32)
        total *= np.uint64(0x9E3779B97F4A7C15)
        return total

    def find(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions of a sequence at which one of the n-grams begins, and its row.

        Args:
            numbers: int32, 0 for values that no n-gram has.

        Returns:
            Two int64 arrays of equal length, positions ascending.
        """
        nothing = np.empty(0, np.int64)
        if len(numbers) < self.n or not len(self):
            return nothing, nothing
        foreign = np.concatenate([[0], np.cumsum(numbers == 0)])
        candidates = np.flatnonzero(foreign[self.n :] == foreign[: -self.n])
        windows = np.lib.stride_tricks.sliding_window_view(numbers, self.n)
        places, rows = [nothing], [nothing]
        for first in range(0, len(candidates), BLOCK):
            at = candidates[first : first + BLOCK]
            hashes = self._hash(windows[at])
            likely = self._occurs[hashes >> np.uint64(64 - FILTER_BITS)]
            at, hashes = at[likely], hashes[likely]
            row = np.minimum(np.searchsorted(self.hashes, hashes), len(self) - 1)
            same = (self.grams[row] == windows[at]).all(axis=1)
            places.append(at[same])
            rows.append(row[same])
        return np.concatenate(places), np.concatenate(rows)


PIECE = 1 << 20  # tokens that are searched together. A longer document is one piece
ALONE = 1 << 23  # files with fewer tokens are read by one process: starting others takes longer
NEVER = np.iinfo(np.int64).max
SHORTEST, LONGEST, QUANTILE = 8, 13, 5  # of GPT-3's n
TOKENS = 11  # of Llama 2: matches of more than ten tokens


def usual_n(lengths: Sequence[int]) -> int:
    """GPT-3's n for a set of examples: the fifth percentile of their lengths in words, from 8 to 13."""
    return int(np.clip(np.percentile(lengths, QUANTILE), SHORTEST, LONGEST)) if len(lengths) else LONGEST


@dataclass(frozen=True)
class Hits:
    """A document's n-grams of examples: rows of the index, and their tokens, int64 [k], [k, 2]."""

    document: int
    rows: np.ndarray
    spans: np.ndarray


@dataclass(frozen=True)
class Scan:
    """The work of a process."""

    path: str
    unit: Tokens | Words
    index: NgramIndex

    def __call__(self, bounds: tuple[int, int]) -> list[Hits]:
        """Hits in documents begin ... end-1."""
        file, (begin, end) = TokenFile(self.path), bounds
        if isinstance(self.unit, Words):
            self.unit.open(file)
        numbers = [self.unit.document(file[each]) for each in range(begin, end)]
        starts = np.cumsum([0, *(len(each) + 1 for each in numbers)])
        between = np.zeros(1, np.int32)
        places, rows = self.index.find(np.concatenate([part for each in numbers for part in (each, between)]))
        of = np.searchsorted(starts, places, side="right") - 1
        found = []
        for each in np.unique(of).tolist():
            own = of == each
            spans = self.unit.spans(file[begin + each], places[own] - starts[each], self.index.n)
            found.append(Hits(begin + each, rows[own], spans))
        return found


def scan(
    file: TokenFile, unit: Tokens | Words, index: NgramIndex, workers: int | None, show: Callable[[int, int], None]
) -> Iterator[Hits]:
    """The documents of a token file that have n-grams of an index, in order.

    Args:
        workers: processes for large files. None: one for each core.
        show: called with (tokens done, all tokens).
    """
    bounds, settings = document_bounds(file, PIECE), (os.fspath(file.prefix), unit, index)
    workers = 1 if file.tokens < ALONE else workers or len(os.sched_getaffinity(0))
    done = 0
    for (begin, end), found in in_order(bounds, workers, Scan, *settings):
        yield from found
        done += int(file.sizes[begin:end].sum())
        show(done, file.tokens)


@dataclass(frozen=True)
class Match:
    """A document that has n-grams of an example."""

    source: str
    document: int
    found: int  # number of the example's distinct n-grams
    start: int  # start, length: tokens of the document from the first of them to the end of the last
    length: int
    first_step: int | None  # the first step that reads tokens of one of them, or None

    @property
    def order(self) -> tuple[int, float, str, int]:
        """Sort key: most n-grams first, then the earliest first step."""
        return (-self.found, NEVER if self.first_step is None else self.first_step, self.source, self.document)


@dataclass
class Overlap:
    """A run's overlap with one example, as numbers of n-gram positions."""

    name: str
    length: int
    ngrams: int = 0  # all. 0 if the example is shorter than n, so that nothing is known of it.
    found: int = 0  # positions whose n-gram is in the token files
    read: int = 0  # positions whose n-gram the run reads
    covered: int = 0  # words (or tokens) of `length` that are in a found n-gram
    first_step: int | None = None  # the first step that reads one, or None
    matches: list[Match] = field(default_factory=list)  # the documents with the most of them


class OverlapSearch:
    """The overlap of examples with the data that a run reads.

    Args:
        examples: names and texts.
        by: "words" or "tokens".
        n: of the n-grams. Default: GPT-3's for words (`usual_n`) and 11 for tokens, as in Llama 2.

    Raises:
        DataError: the run makes its data, there are no examples, or n is below 1.
    """

    def __init__(
        self,
        provenance: Provenance,
        tokenizer: Tokenizer,
        examples: Sequence[tuple[str, str]],
        by: str = "words",
        n: int | None = None,
    ) -> None:
        if isinstance(provenance.plan, SyntheticPlan):
            raise DataError("data.synthetic", "this run makes its data, so there are no documents", "name another run")
        if not examples:
            raise DataError("--examples", "there are none", "give a file or a task with at least one")
        if n is not None and n < 1:
            raise DataError("--n", f"it must be at least 1, not {n}", "omit it for the published one")
        self.provenance, self.by = provenance, by
        self._sources = provenance.plan.sources
        self._unit: Tokens | Words = Words(tokenizer) if by == "words" else Tokens(tokenizer)
        self._names = [name for name, _ in examples]
        self._numbers = [self._unit.example(text) for _, text in examples]
        self.n = n or (usual_n([len(each) for each in self._numbers]) if by == "words" else TOKENS)
        self.index = NgramIndex(self._numbers, self.n, self._unit.largest)
        self._found = np.zeros(len(self.index), bool)
        self._first = np.full(len(self.index), NEVER)
        self._matches: list[list[Match]] = [[] for _ in examples]
        self._owners, self._owner_starts = self._examples_of_rows()

    def _examples_of_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """The examples that have each n-gram: for row r, owners[starts[r] : starts[r + 1]]."""
        pairs = [np.stack([np.unique(rows), np.full(len(np.unique(rows)), i)]) for i, rows in enumerate(self.index.of)]
        rows, examples = np.concatenate(pairs, axis=1)
        order = np.argsort(rows, kind="stable")
        return examples[order], np.searchsorted(rows[order], np.arange(len(self.index) + 1))

    def run(
        self,
        most: int = 3,
        workers: int | None = None,
        show: Callable[[str], Callable[[int, int], None]] = lambda source: lambda done, total: None,
    ) -> list[Overlap]:
        """Read all token files once.

        Args:
            most: largest number of documents that are listed for an example.
            workers: processes for large files. None: one for each core.
            show: makes, from a source's name, the function that is called with (tokens done, all tokens).
        """
        for source in self._sources:
            for hits in scan(source.file, self._unit, self.index, workers, show(source.name)):
                self._take(source.index, source.name, hits, most)
        return [self._overlap(place) for place in range(len(self._names))]

    def _take(self, source: int, name: str, hits: Hits, most: int) -> None:
        steps = self._steps(source, hits)
        self._found[hits.rows] = True
        np.minimum.at(self._first, hits.rows, steps)
        rows, inverse = np.unique(hits.rows, return_inverse=True)
        first = np.full(len(rows), NEVER)
        begin, end = np.full(len(rows), NEVER), np.zeros(len(rows), np.int64)
        np.minimum.at(first, inverse, steps)
        np.minimum.at(begin, inverse, hits.spans[:, 0])
        np.maximum.at(end, inverse, hits.spans[:, 1])
        counts = self._owner_starts[rows + 1] - self._owner_starts[rows]
        owners = np.concatenate([self._owners[self._owner_starts[row] : self._owner_starts[row + 1]] for row in rows])
        of_row = np.repeat(np.arange(len(rows)), counts)
        order = np.argsort(owners, kind="stable")
        examples, starts = np.unique(owners[order], return_index=True)
        for example, own in zip(examples.tolist(), np.split(of_row[order], starts[1:])):
            start, step = int(begin[own].min()), int(first[own].min())
            length = int(end[own].max()) - start
            match = Match(name, hits.document, len(own), start, length, None if step == NEVER else step)
            kept = self._matches[example]
            kept.append(match)
            kept.sort(key=lambda each: each.order)
            del kept[most:]

    def _steps(self, source: int, hits: Hits) -> np.ndarray:
        """The first step that reads tokens of each place, int64 [k]. NEVER if none does."""
        first = np.full(len(hits.rows), NEVER)
        hull = int(hits.spans.min()), int(hits.spans.max())
        for step, span in self.provenance.readings(source, hits.document, *hull):
            touches = (hits.spans[:, 0] < span.start + span.length) & (hits.spans[:, 1] > span.start)
            first[touches] = np.minimum(first[touches], step)
        return first

    def _overlap(self, place: int) -> Overlap:
        rows, length = self.index.of[place], len(self._numbers[place])
        found = self._found[rows]
        inside = np.zeros(length + 1, np.int64)  # number of found n-grams that begin before a word and end after it
        np.add.at(inside, np.flatnonzero(found), 1)
        np.add.at(inside, np.flatnonzero(found) + self.n, -1)
        first = int(self._first[rows].min(initial=NEVER))
        return Overlap(
            self._names[place],
            length,
            len(rows),
            int(found.sum()),
            int((self._first[rows] < NEVER).sum()),
            int((np.cumsum(inside)[:length] > 0).sum()),
            None if first == NEVER else first,
            self._matches[place],
        )
