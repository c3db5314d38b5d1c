"""Assemble a sample from pieces of documents: tokens, the weight of each label, and starts of documents.

Span corruption for a decoder is that of Raffel et al. 2020 ("Exploring the Limits of Transfer Learning with a Unified
Text-to-Text Transformer", arXiv 1910.10683). `a b c d e f g` with the spans `b c` and `f` becomes
`a <0> d e <1> g <0> b c <1> f`. The numbers and places of removed tokens and spans follow T5's rule
(`random_spans_noise_mask` in its preprocessors)."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron.config.arithmetic.batches import span_sizes

from .hashing import generator
from .order.order import TokenRange


@dataclass(frozen=True)
class Corruption:
    """Options of the corruption."""

    rate: float  # share of the documents
    density: float  # share of a document's tokens that are removed
    mean: float  # tokens of a span, on average
    sentinels: tuple[int, ...]  # ids that replace spans, in order, and so the largest number of spans in a document
    targets_only: bool = True  # of a corrupted document only the removed spans are targets

    def sizes(self, length: int, most: int | None = None) -> tuple[int, int]:
        """(tokens to remove from `length`, number of their spans, at most `most`)."""
        spans = len(self.sentinels) if most is None else min(most, len(self.sentinels))
        return span_sizes(length, self.density, self.mean, spans)


def _parts(items: int, count: int, draw: np.random.Generator) -> np.ndarray:
    """Lengths of at least 1 of `count` parts of `items`. All such lists are equally likely."""
    cuts = np.sort(draw.choice(items - 1, count - 1, replace=False)) + 1
    return np.diff([0, *cuts, items])


def noise_mask(length: int, options: Corruption, draw: np.random.Generator, most: int | None = None) -> np.ndarray:
    """Mask of removed tokens, bool [length]. The first token stays and the last one is removed."""
    noise, spans = options.sizes(length, most)
    if not spans:
        return np.zeros(length, bool)
    taken, kept = _parts(noise, spans, draw), _parts(length - noise, spans, draw)
    return np.repeat(np.arange(2 * spans) % 2 == 1, np.stack([kept, taken], 1).flatten())


def corrupt(
    tokens: np.ndarray, options: Corruption, draw: np.random.Generator, most: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """A document's tokens without its spans, then the spans, and which of these tokens are targets. Each span adds two
    tokens.

    Args:
        most: largest number of spans. With 0 the document stays unchanged.
    """
    mask = noise_mask(len(tokens), options, draw, most)
    if not mask.any():
        return tokens, np.ones(len(tokens), bool)
    first = mask & ~np.concatenate([[False], mask[:-1]])  # of each span
    sentinels = np.asarray(options.sentinels[: int(first.sum())], dtype=tokens.dtype)
    text = tokens.copy()
    text[first] = sentinels
    text = text[~mask | first]
    spans = np.insert(tokens[mask], np.flatnonzero(first[mask]), sentinels)
    targets = np.arange(len(text) + len(spans)) >= (len(text) if options.targets_only else 0)
    return np.concatenate([text, spans]), targets


IGNORED = -100  # in a label file: this token is no target


@dataclass(frozen=True)
class Infilling:
    """Fill-in-the-middle: rates, and the ids of its three tokens."""

    rate: float
    suffix_first_rate: float
    prefix: int
    middle: int
    suffix: int


@dataclass(frozen=True)
class AssemblyOptions:
    """Options of assembling samples."""

    sequence_length: int  # S
    seed: int = 0  # of the data order. Infilling draws from it.
    eod: int | None = None  # id of the end-of-document token, if needed
    mask_eod: bool = False  # the end-of-document token is no target
    boundaries: bool = False  # mark starts of documents
    infilling: Infilling | None = None  # infilling, corruption: at most one of them. None keeps documents as they are.
    corruption: Corruption | None = None
    # Id that fills samples up and is a target if all tokens are, as in GPT-NeoX. None fills them with `eod`, which is
    # no target there.
    filler: int | None = None
    context: int = 0  # number of tokens before a sample to read too, where it starts within a document
    read: int | None = None  # new tokens of a sample's pieces where documents grow. Default: S.

    @property
    def new_tokens(self) -> int:
        """Tokens of its pieces that are not another sample's first."""
        return self.sequence_length if self.read is None else self.read

    @property
    def reorders(self) -> bool:
        """Whether samples reorder the tokens of documents."""
        return self.infilling is not None or self.corruption is not None


@dataclass(frozen=True)
class Sample:
    """One sample."""

    tokens: np.ndarray  # int64 [S+1]
    weights: np.ndarray | None = None  # float32 [S], the weight of each label. None: all ones.
    begins: np.ndarray | None = None  # bool [S+1], whether a document begins at this token. None if not requested.
    source: int = 0  # number of its source in the plan
    spans: tuple[TokenRange, ...] = ()  # the pieces it was made of, before infilling.
    # Up to `AssemblyOptions.context` tokens before it in its first document. None if documents are reordered.
    lead: np.ndarray | None = None
    columns: Mapping[str, np.ndarray] | None = None  # further numbers of each label, float32 [S], by name


def infill(tokens: np.ndarray, options: Infilling, draw: np.random.Generator) -> np.ndarray:
    """Move the middle of a document's tokens to the end (PSM, or SPM with the suffix first), or return them unchanged.

    Two random cuts make prefix, middle and suffix. PSM is <prefix> prefix <suffix> suffix <middle> middle. SPM is
    <prefix>
    <suffix> suffix <middle> prefix middle."""
    chance, order = draw.random(2)
    cuts = np.sort(draw.integers(0, len(tokens) + 1, size=2))
    if chance >= options.rate or not len(tokens):
        return tokens
    prefix, middle, suffix = np.split(tokens, cuts)
    if order < options.suffix_first_rate:
        parts = [[options.prefix, options.suffix], suffix, [options.middle], prefix, middle]
    else:
        parts = [[options.prefix], prefix, [options.suffix], suffix, [options.middle], middle]
    return np.concatenate([np.asarray(part, dtype=tokens.dtype) for part in parts])


def _documents(tokens: np.ndarray, lengths: list[int], eod: int | None) -> list[np.ndarray]:
    cuts = np.cumsum(lengths[:-1], dtype=np.int64)
    if eod is not None:
        cuts = np.union1d(cuts, np.flatnonzero(tokens[:-1] == eod) + 1)
    return np.split(tokens, cuts.astype(np.int64))


def _infilled(documents: list[np.ndarray], options: AssemblyOptions, how: Infilling, number: int) -> list[np.ndarray]:
    """Infill each document by its own draw. Its end-of-document token stays at the end."""
    result = []
    for index, tokens in enumerate(documents):
        draw = generator(options.seed, "fim", number, index)
        ended = len(tokens) > 0 and options.eod is not None and tokens[-1] == options.eod
        body = infill(tokens[:-1] if ended else tokens, how, draw)
        result.append(np.append(body, tokens[-1]) if ended else body)
    return result


def _corrupted(
    documents: list[np.ndarray], options: AssemblyOptions, how: Corruption, number: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """Corrupt each document by its own draw. Returns the documents, and which of all tokens are targets.

    They read fewer tokens than a sample has (`config.span_lengths`). Several short documents may grow by more than a
    single long one. With too little room a document has fewer spans or stays unchanged, so nothing is lost."""
    result, targets = list[np.ndarray](), list[np.ndarray]()
    room = max(0, options.sequence_length + 1 - sum(map(len, documents)))
    for index, tokens in enumerate(documents):
        ended = len(tokens) > 0 and options.eod is not None and tokens[-1] == options.eod
        body, draw = tokens[:-1] if ended else tokens, generator(options.seed, "span_corruption", number, index)
        made, learned = body, np.ones(len(body), bool)
        if draw.random() < how.rate:
            made, learned = corrupt(body, how, draw, room // 2)
        room -= len(made) - len(body)
        result.append(np.append(made, tokens[-1]) if ended else made)
        targets.append(np.append(learned, True) if ended else learned)
    return result, np.concatenate(targets)[: options.sequence_length + 1]


def assemble(
    pieces: list[np.ndarray], options: AssemblyOptions, number: int, targets: np.ndarray | None = None, scale: float = 1
) -> Sample:
    """Make a sample.

    Args:
        pieces: tokens of its spans, S+1 in total. Fewer are filled up (see `AssemblyOptions.filler`).
        number: the sample's global number, for keyed draws.
        targets: weight of each token as a target, at least 0 (or bool). None: 1 for all.
        scale: of all weights.
    """
    width = options.sequence_length + 1
    tokens = np.concatenate(pieces).astype(np.int64, copy=False)
    begins = learned = None
    if options.boundaries or options.reorders:
        documents = _documents(tokens, [len(piece) for piece in pieces], options.eod)
        if options.infilling:
            documents = _infilled(documents, options, options.infilling, number)
        if options.corruption:
            documents, learned = _corrupted(documents, options, options.corruption, number)
        if options.reorders:
            tokens = np.concatenate(documents)[:width]
        if options.boundaries:
            firsts = np.cumsum([0, *(len(each) for each in documents)])  # the filler is a document too
            begins = np.zeros(width, bool)
            begins[firsts[firsts < width]] = True
    counts = np.full(width, scale, np.float32)
    if targets is not None:
        counts[: len(targets)] *= targets
        counts[len(targets) :] = 0.0  # the filler
    if learned is not None:
        counts[: len(learned)] *= learned
    if options.filler is None or learned is not None:
        counts[len(tokens) :] = 0.0
    if len(tokens) < width:
        filler = (options.eod or 0) if options.filler is None else options.filler
        tokens = np.concatenate([tokens, np.full(width - len(tokens), filler)])
    if options.mask_eod:
        counts[tokens == options.eod] = 0.0
    weights = None if (counts[1:] == 1.0).all() else counts[1:]
    return Sample(tokens, weights, begins)


def documents_and_positions(begins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Document index and position in the document of each input token, int32 [S] each, from `Sample.begins`."""
    begins = begins[:-1]
    documents = np.maximum(np.cumsum(begins) - 1, 0)
    places = np.arange(len(begins))
    firsts = np.maximum.accumulate(np.where(begins, places, 0))
    return documents.astype(np.int32), (places - firsts).astype(np.int32)
