"""From pieces of documents to one sample: tokens, the weight of each label, and where documents begin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .keyed import generator
from .order.order import TokenRange
from .order.span_corruption import Corruption, corrupt

IGNORED = -100  # a label file's mark of a token that is no target


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
    """How samples are made of pieces.

    Attributes:
        sequence_length: S.
        seed: of the data order; infilling draws from it.
        eod: id of the end-of-document token, if it matters.
        mask_eod: the end-of-document token is no target.
        boundaries: say where documents begin.
        infilling, corruption: one of them, or None, which leaves documents as they are.
        context: tokens before a sample to read too, where it begins within a document.
        read: new tokens of a sample's pieces where documents grow; S by default.
        filler: id that fills samples up and is a target like any other where all tokens are, as in GPT-NeoX; None fills
            them with `eod`, which is no target there.
    """

    sequence_length: int
    seed: int = 0
    eod: int | None = None
    mask_eod: bool = False
    boundaries: bool = False
    infilling: Infilling | None = None
    corruption: Corruption | None = None
    filler: int | None = None
    context: int = 0
    read: int | None = None

    @property
    def new_tokens(self) -> int:
        """Tokens of its pieces that no other sample begins with."""
        return self.sequence_length if self.read is None else self.read

    @property
    def reorders(self) -> bool:
        """Whether tokens do not stand in a sample as in its documents."""
        return self.infilling is not None or self.corruption is not None


@dataclass(frozen=True)
class Sample:
    """One sample.

    Attributes:
        tokens: int64 [S+1].
        weights: float32 [S], the weight of each label; None means all ones.
        begins: bool [S+1], whether a document begins at this token; None if not asked for.
        source: number of its source in the plan.
        spans: the pieces it was made of, before infilling.
        lead: the tokens before it in the document that it begins within, `AssemblyOptions.context` of them or fewer;
            none where documents are reordered.
        columns: further numbers of each label, float32 [S], by name.
    """

    tokens: np.ndarray
    weights: np.ndarray | None = None
    begins: np.ndarray | None = None
    source: int = 0
    spans: tuple[TokenRange, ...] = ()
    lead: np.ndarray | None = None
    columns: Mapping[str, np.ndarray] | None = None


def infill(tokens: np.ndarray, options: Infilling, draw: np.random.Generator) -> np.ndarray:
    """A document's tokens with a middle moved to the end (PSM, or SPM with the suffix first), or as they are.

    Two cuts at random places make prefix, middle and suffix. PSM is <prefix> prefix <suffix> suffix <middle> middle;
    SPM is <prefix> <suffix> suffix <middle> prefix middle.
    """
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
    """Pieces cut further where an end-of-document token stands inside."""
    cuts = np.cumsum(lengths[:-1], dtype=np.int64)
    if eod is not None:
        cuts = np.union1d(cuts, np.flatnonzero(tokens[:-1] == eod) + 1)
    return np.split(tokens, cuts.astype(np.int64))


def _infilled(documents: list[np.ndarray], options: AssemblyOptions, how: Infilling, number: int) -> list[np.ndarray]:
    """Each document infilled by a draw of its own; its end-of-document token stays at the end."""
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
    """Each document corrupted by a draw of its own, and which tokens of all of them are targets.

    They read fewer tokens than a sample has (`config.span_lengths`). Short documents may grow by more than what one
    long one would: those that find less room than they need have fewer spans, or stay as they are, so nothing is lost.
    """
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
    pieces: list[np.ndarray],
    options: AssemblyOptions,
    number: int,
    targets: np.ndarray | None = None,
    scale: float = 1.0,
) -> Sample:
    """Make a sample.

    Args:
        pieces: tokens of its spans, S+1 in all, or fewer: then it is filled up; see `AssemblyOptions.filler`.
        number: the sample's global number, for keyed draws.
        targets: what each token counts as a target, at least 0 (or bool: whether it is one); None means 1 for all.
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
            firsts = np.cumsum([0, *(len(each) for each in documents)])  # with the end: what fills up is a document too
            begins = np.zeros(width, bool)
            begins[firsts[firsts < width]] = True
    counts = np.full(width, scale, np.float32)
    if targets is not None:
        counts[: len(targets)] *= targets
        counts[len(targets) :] = 0.0  # what was added
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
    """Document index and position in the document of each input token; int32 [S] each, from `Sample.begins`."""
    begins = begins[:-1]
    documents = np.maximum(np.cumsum(begins) - 1, 0)
    places = np.arange(len(begins))
    firsts = np.maximum.accumulate(np.where(begins, places, 0))
    return documents.astype(np.int32), (places - firsts).astype(np.int32)
