"""Finding a text in token files: in the bytes that their tokens stand for.

Nearly every tokenizer gives each id a fixed string of bytes, and a document's text is these strings one after another.
So a text is found however its tokens are cut, at the speed of joining bytes. Where ids have no fixed bytes, documents
are decoded one by one.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from .token_file import TokenFile
from .tokenizer import Tokenizer

CHUNK = 1 << 20  # tokens that are looked at together
CHECKED = 64  # documents on which the table of bytes is compared with the tokenizer's own decoding
ALONE = 1 << 23  # files with fewer tokens than this are searched by one process: starting others takes longer
ALONE_DECODING = 1 << 18  # the same where documents are decoded

Place = tuple[int, int, int]  # document, first token, tokens


@dataclass(frozen=True)
class TextSearch:
    """What each process needs; `table` has the bytes of each id, or is None where documents are decoded."""

    path: str
    tokenizer: Tokenizer
    text: str
    table: list[bytes] | None

    def run(self, begin: int, end: int) -> list[Place]:
        """Places that begin in tokens begin ... end-1 (or, where documents are decoded, in documents)."""
        file = TokenFile(self.path)
        if self.table is not None:
            return _in_bytes(file, self.table, self.text.encode(), begin, end)
        return [place for number in range(begin, end) for place in _decoded(file, self.tokenizer, number, self.text)]


def find_text(
    file: TokenFile,
    tokenizer: Tokenizer,
    text: str,
    workers: int | None = None,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Place]:
    """Places of a text in a token file, in order: the smallest stretch of tokens of a document whose text has it.

    Args:
        workers: processes for large files; None takes one for each core.
        show: told how many tokens of how many are done.
    """
    table = table_of(file, tokenizer)
    search = TextSearch(os.fspath(file.prefix), tokenizer, text, table)
    bounds = _bounds(file, by_token=table is not None)
    workers = workers or len(os.sched_getaffinity(0))
    if file.tokens < (ALONE if table is not None else ALONE_DECODING):
        workers = 1
    done = 0
    for (begin, end), found in zip(bounds, _results(search, bounds, workers)):
        yield from found
        done += end - begin if table is not None else int(file.sizes[begin:end].sum())
        show(done, file.tokens)


def _results(search: TextSearch, bounds: list[tuple[int, int]], workers: int) -> Iterator[list[Place]]:
    if workers == 1 or len(bounds) == 1:
        yield from (search.run(*each) for each in bounds)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_prepare, initargs=(search,)) as pool:
        yield from pool.map(_run, bounds)


_search: list[TextSearch] = []  # of a worker process


def _prepare(search: TextSearch) -> None:
    _search[:] = [search]


def _run(bounds: tuple[int, int]) -> list[Place]:
    return _search[0].run(*bounds)


def _bounds(file: TokenFile, by_token: bool) -> list[tuple[int, int]]:
    """Equal runs of tokens, or runs of documents with about as many."""
    if by_token:
        return [(begin, min(begin + CHUNK, file.tokens)) for begin in range(0, file.tokens, CHUNK)]
    cuts = np.searchsorted(file.starts(slice(None)), np.arange(0, file.tokens, CHUNK // 16), side="left")
    edges = sorted({0, *cuts.tolist(), len(file)})
    return list(zip(edges, edges[1:]))


def table_of(file: TokenFile, tokenizer: Tokenizer) -> list[bytes] | None:
    """The bytes of each id; None if the tokenizer has none, or decodes documents of this file differently."""
    table = tokenizer.bytes_of_ids()
    if table is None or file.tokens == 0:
        return table
    for document in np.unique(np.linspace(0, len(file) - 1, CHECKED).astype(np.int64)).tolist():
        ids = file[document][:4096].tolist()
        if any(not 0 <= each < len(table) for each in ids):
            return None
        joined = b"".join([table[each] for each in ids]).decode("utf-8", "replace")
        whole = tokenizer.decode(ids)
        if joined != whole and joined.removeprefix(" ") != whole:  # some decoders drop the first space of a text
            return None
    return table


def _in_bytes(file: TokenFile, table: list[bytes], needle: bytes, begin: int, end: int) -> list[Place]:
    """Places whose first token is one of begin ... end-1 of the file."""
    lengths = np.fromiter(map(len, table), np.int64, len(table))
    ids = file.flat(begin, end - begin)
    own = int(lengths[ids].sum())
    reach, last = own, end
    while reach < own + len(needle) - 1 and last < file.tokens:  # a place may go on after the last token
        more = file.flat(last, len(needle))
        reach, last = reach + int(lengths[more].sum()), last + len(more)
    ids = file.flat(begin, last - begin)
    content = b"".join(map(table.__getitem__, ids.tolist()))
    starts, at = [], content.find(needle)
    while 0 <= at < own:
        starts.append(at)
        at = content.find(needle, at + 1)
    if not starts:
        return []
    ends = np.cumsum(lengths[ids])
    places = np.array(starts)
    firsts = np.searchsorted(ends, places, side="right")
    counts = np.searchsorted(ends, places + len(needle), side="left") + 1 - firsts
    return _of_documents(file, firsts + begin, counts)


def _of_documents(file: TokenFile, firsts: np.ndarray, counts: np.ndarray) -> list[Place]:
    """Stretches of tokens of the file, without those that go over the end of a document, each once."""
    itemsize = file.dtype.itemsize
    documents = np.searchsorted(file.offsets, firsts * itemsize, side="right") - 1
    inside = firsts - file.offsets[documents] // itemsize
    whole = inside + counts <= file.sizes[documents]
    stretches = zip(documents[whole].tolist(), inside[whole].tolist(), counts[whole].tolist())
    return list(dict.fromkeys(stretches))


def _decoded(file: TokenFile, tokenizer: Tokenizer, document: int, text: str) -> Iterator[Place]:
    """Places in a document, by decoding it."""
    ids = file[document].tolist()
    whole = tokenizer.decode(ids)
    seen, begin = set(), whole.find(text)
    while begin >= 0:
        first, last = tokens_of(tokenizer, ids, begin, begin + len(text))
        if (place := (document, first, max(last - first, 1))) not in seen:
            seen.add(place)
            yield place
        begin = whole.find(text, begin + 1)


def tokens_of(tokenizer: Tokenizer, ids: list[int], begin: int, end: int) -> tuple[int, int]:
    """The tokens that characters begin ... end-1 of the decoded text stand in: the first, and one past the last."""
    length = partial(_characters, tokenizer, ids)
    return _least(len(ids), partial(_reaches, length, begin + 1, 1)), _least(
        len(ids), partial(_reaches, length, end, 0)
    )


def _reaches(length: Callable[[int], int], end: int, more: int, count: int) -> bool:
    """Whether `count` tokens and `more` have at least `end` characters."""
    return length(count + more) >= end


def _characters(tokenizer: Tokenizer, ids: list[int], count: int) -> int:
    return len(tokenizer.decode(ids[:count]))


def _least(high: int, reached: Callable[[int], bool]) -> int:
    """The least count below `high` from which on `reached` holds; `high` if there is none."""
    low = 0
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle + 1, high)
    return low
