"""GPT-NeoX's pack_until_overflow: whole documents until the next one does not fit.

One `RandomState(seed)` shuffles first the samples, then the documents, and these again for each further pass. A sample
is a row of whole documents with at most S+1 tokens, then, if there is room, the first token of the next sample's first
document. A document longer than S+1 tokens is a sample by itself, cut after S+1 tokens, or is dropped. Missing tokens
are filled up."""

import os
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from ..errors import DataError
from ..token_file import TokenFile
from .cache import Arrays, cached
from .order import Lookup, Order, TokenRange, with_repeats


def begins(sizes: np.ndarray, width: int, running: int) -> tuple[list[int], int]:
    """Starts of the samples in one pass over documents, and the tokens of the last one.

    A sample without tokens takes no further document, as in GPT-NeoX: the next document begins a new sample.

    Args:
        sizes: int64 [D], tokens of the documents in their order.
        width: S+1.
        running: tokens of the sample that the previous pass left open.
    """
    ends = np.concatenate([[0], np.cumsum(sizes)])
    following = np.searchsorted(ends, ends[:-1] + width, side="right") - 1
    following = np.where(sizes == 0, np.arange(len(sizes)), following)
    following = np.maximum(following, np.arange(len(sizes)) + 1).tolist()
    first = int(np.searchsorted(ends, width - running, side="right")) - 1 if 0 < running <= width else 0
    if first >= len(sizes):
        return [], running + int(ends[-1])
    found = []
    while first < len(sizes):
        found.append(first)
        first = following[first]
    return found, int(ends[-1] - ends[found[-1]])


def build_arrays(
    sizes: np.ndarray, first: int, width: int, seed: int, samples: int | None, usable: np.ndarray | None
) -> Arrays:
    """Pack documents first ... first + len(sizes) - 1.

    Args:
        sizes: their tokens.
        width: S+1.
        samples: number of samples to make. None: one pass.
        usable: bool, the documents to take. None: all.

    Returns:
        documents: int32 (or int64) of all needed passes (GPT-NeoX's doc_idx).
        starts: int64 [N+1], each sample's first entry of `documents`, and their number (sample_idx).
        pieces: int64 [N], the shuffled samples (shuffle_idx).
    """
    generator = np.random.RandomState(seed)
    pieces = np.arange(samples or 0)
    generator.shuffle(pieces)
    order, sizes = np.arange(len(sizes)), sizes.astype(np.int64)
    passes, starts, made, length, running = [], [], 0, 0, 0
    while samples is None or made < samples:
        generator.shuffle(order)
        taken = order.copy() if usable is None else order[usable[order]]
        found, running = begins(sizes[taken], width, running)
        starts.append(np.array(found, np.int64) + length)
        made, length = made + len(found), length + len(taken)
        passes.append(taken)
        if samples is None:
            pieces = np.arange(made)
            generator.shuffle(pieces)
            break
    firsts = np.concatenate(starts)[:samples]
    if samples is not None:
        length = int(firsts[-1]) + 1  # GPT-NeoX stops as soon as the last sample has its first document
    documents = (np.concatenate(passes)[:length] + first).astype(np.int32 if first + len(sizes) < 2**31 else np.int64)
    return {"documents": documents, "starts": np.append(firsts, length), "pieces": pieces}


class OverflowOrder(Order):
    """The order of one source.

    Attributes:
        length: N-1, as in GPT-NeoX. Sample k is piece k for k < N, then piece k mod length.
        closed: whether all samples are complete. In GPT-NeoX the last one made has one document and fails when it is
            read. Here piece (N-1) mod length = 0 of the shuffled ones replaces it.
    """

    def __init__(
        self,
        file: TokenFile,
        first: int,
        last: int,
        sequence_length: int,
        seed: int,
        *,
        samples: int | None = None,
        epochs: int | None = None,
        drop_long: bool = False,
        labels: TokenFile | None = None,
        fingerprint: str | None = None,
        cache: str | os.PathLike | None = None,
    ):
        """Of documents first ... last-1. Give the number of samples that will be read, or epochs = 1 for one pass.

        Args:
            drop_long: skip documents of more than S+1 tokens (GPT-NeoX's allow_chopped: false).
            labels: the label file. Documents without a target among their first S+1 tokens are skipped.
        """
        self.file, self.sequence_length = file, sequence_length
        self.first, self.last, self.closed = first, last, epochs is not None
        self.tokens, width = file.tokens_of(first, last), sequence_length + 1
        sizes = np.ascontiguousarray(file.sizes[first:last])
        usable = np.ones(len(sizes), bool)
        if drop_long:
            usable &= sizes <= width
        if labels is not None:
            rows = (labels.read(document, 0, min(width, int(file.sizes[document]))) for document in range(first, last))
            usable &= np.fromiter(((row != -100).any() for row in rows), bool, len(sizes))
        if not sizes[usable].sum():
            fix = "use data.drop_long: false, a larger training.sequence_length, or other files"
            raise DataError(file.prefix, f"no document of up to {width} tokens with a target is left to pack", fix)
        wanted = None if epochs is not None else max(samples or 0, 2)
        key: tuple[object, ...] = ()
        if cache is not None:
            key = (fingerprint or file.fingerprint(), first, last, sequence_length, seed, wanted, drop_long)
            key += (labels.fingerprint(),) if labels is not None else ()
        chosen = None if usable.all() else usable
        arrays = cached(cache, "overflow", key, lambda: build_arrays(sizes, first, width, seed, wanted, chosen))
        self.documents, self.starts, self.pieces = arrays["documents"], arrays["starts"], arrays["pieces"]
        self.length = max(len(self.pieces) - (0 if self.closed else 1), 1)
        self._entries = Lookup(self.documents)
        lengths = np.add.reduceat(file.sizes[self.documents].astype(np.int64), self.starts[:-1])
        self.filled = float(np.minimum(lengths, width).mean()) / width
        self.description = f"GPT-NeoX's pack_until_overflow, samples {100 * self.filled:.1f} % full"
        if left := int((~usable).sum()):
            self.description += f", {left} of {len(usable)} documents skipped"

    @cached_property
    def _read(self) -> Lookup:
        return Lookup(np.array([self.place(sample) for sample in range(len(self.pieces))]))

    def place(self, sample: int) -> int:
        """The piece of sample k."""
        piece = int(self.pieces[sample if sample < len(self.pieces) else sample % self.length])
        if self.closed or piece < self.length:
            return piece
        return int(self.pieces[0]) if int(self.pieces[0]) < self.length else int(self.pieces[1])

    def spans(self, sample: int) -> list[TokenRange]:
        piece = self.place(sample)
        begin, end = int(self.starts[piece]), int(self.starts[piece + 1])
        lengths = [*self.file.sizes[self.documents[begin:end]].tolist()]
        if end < len(self.documents):
            lengths.append(1)
        missing, spans = self.sequence_length + 1, []
        for document, length in zip(self.documents[begin : begin + len(lengths)].tolist(), lengths):
            length = min(length, missing, int(self.file.sizes[document]))
            if length:
                spans.append(TokenRange(document, 0, length))
                missing -= length
        return spans

    def find(self, document: int, below: int) -> Iterator[int]:
        entries = self._entries.places([document])
        near = np.searchsorted(self.starts, entries, side="right") - 1
        near = np.union1d(near, near - 1).tolist()  # the first token of a document ends the sample before
        found = [n for n in self._read.places(near).tolist() if any(s.document == document for s in self.spans(n))]
        yield from with_repeats(found, self.length, len(self.pieces), below)
