"""Find a text in token files, by the bytes of their tokens.

Nearly every tokenizer gives each id a fixed string of bytes, and a document's text is these strings in sequence. So a
text is found for any cut into tokens, at the speed of joining bytes. Where ids have no fixed bytes, documents are
decoded one by one."""

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from .corpus.job import in_order
from .token_file import TokenFile
from .tokenizer import Tokenizer

CHUNK = 1 << 20  # tokens that are searched together
CHECKED = 64  # documents on which the table of bytes is compared with the tokenizer's own decoding
ALONE = 1 << 23  # smaller files, in tokens, are searched by one process: starting others takes longer
ALONE_DECODING = 1 << 18  # the same where documents are decoded

Place = tuple[int, int, int]  # document, first token, tokens


@dataclass(frozen=True)
class TextSearch:
    """The work of a process. `table` has the bytes of each id, or is None if documents are decoded."""

    path: str
    tokenizer: Tokenizer
    text: str
    table: list[bytes] | None

    def __call__(self, bounds: tuple[int, int]) -> list[Place]:
        """Matches that begin in tokens begin ... end-1 (or in these documents, where documents are decoded)."""
        file, (begin, end) = TokenFile(self.path), bounds
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
    """Matches of a text in a token file, in order: the smallest ranges of a document's tokens with the text.

    `workers` are processes for large files (None: one for each core), and `show` is called with (tokens done, all
    tokens)."""
    table = table_of(file, tokenizer)
    bounds = _bounds(file, by_token=table is not None)
    workers = workers or len(os.sched_getaffinity(0))
    if file.tokens < (ALONE if table is not None else ALONE_DECODING):
        workers = 1
    done = 0
    settings = (os.fspath(file.prefix), tokenizer, text, table)
    for (begin, end), found in in_order(bounds, workers, TextSearch, *settings):
        yield from found
        done += end - begin if table is not None else int(file.sizes[begin:end].sum())
        show(done, file.tokens)


def _bounds(file: TokenFile, by_token: bool) -> list[tuple[int, int]]:
    """Equal ranges of tokens, or ranges of documents with about the same number of tokens."""
    if by_token:
        return [(begin, min(begin + CHUNK, file.tokens)) for begin in range(0, file.tokens, CHUNK)]
    return document_bounds(file, CHUNK // 16)


def document_bounds(file: TokenFile, tokens: int) -> list[tuple[int, int]]:
    """Ranges of documents with about this number of tokens."""
    cuts = np.searchsorted(file.starts(slice(None)), np.arange(0, file.tokens, tokens), side="left")
    edges = sorted({0, *cuts.tolist(), len(file)})
    return list(zip(edges, edges[1:]))


def table_of(file: TokenFile, tokenizer: Tokenizer) -> list[bytes] | None:
    """The bytes of each id. None if the tokenizer has none, or decodes documents of this file differently."""
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
    """Matches whose first token is one of begin ... end-1 of the file."""
    lengths = np.fromiter(map(len, table), np.int64, len(table))
    ids = file.flat(begin, end - begin)
    own = int(lengths[ids].sum())
    reach, last = own, end
    while reach < own + len(needle) - 1 and last < file.tokens:  # a match may continue after the last token
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
    itemsize = file.dtype.itemsize
    documents = np.searchsorted(file.offsets, firsts * itemsize, side="right") - 1
    inside = firsts - file.offsets[documents] // itemsize
    whole = inside + counts <= file.sizes[documents]
    stretches = zip(documents[whole].tolist(), inside[whole].tolist(), counts[whole].tolist())
    return list(dict.fromkeys(stretches))


def _decoded(file: TokenFile, tokenizer: Tokenizer, document: int, text: str) -> Iterator[Place]:
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
    """The tokens of characters begin ... end-1 of the decoded text: the first, and one past the last."""

    def length(count: int) -> int:
        return len(tokenizer.decode(ids[:count]))

    counts = range(len(ids))
    return bisect_right(counts, begin, key=lambda count: length(count + 1)), bisect_left(counts, end, key=length)
