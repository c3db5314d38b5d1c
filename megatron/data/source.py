"""One source of a run: a token file, the order of its samples, and the weights of its tokens."""

import os
from functools import cached_property
from zipfile import BadZipFile

import numpy as np

from megatron.config.sections.data import DataSection, SourceSection

from .errors import DataError
from .hashing import content_hash
from .manifest import BlockChecksums, DamagedTokens, Manifest, read_manifest
from .order.cache import examine_once
from .order.order import Order, SequentialOrder, StreamOrder, TokenRange, WindowOrder
from .order.overflow import OverflowOrder
from .order.packing import PackedOrder
from .order.pythia import PythiaOrder
from .sample import IGNORED, AssemblyOptions, Sample, assemble
from .token_file import TokenFile

PIECE = 1 << 24  # weights that are checked together


class SourceFile:
    """A token file of a blend, examined but not ordered yet. Documents first ... last-1 are used."""

    def __init__(self, section: SourceSection, cache: str | os.PathLike | None, bounds: tuple[int, int] | None = None):
        """Open and examine. `bounds` are the documents to use, by default all.

        Raises:
            DataError: the pair is missing, truncated or damaged.
        """
        self.file = TokenFile(section.path)
        self.name, self.path = section.name or self.file.prefix.name, section.path
        self.counts = section.loss_weight if section.loss else 0.0  # of each label, in training
        self.loss = section.loss
        self.weight = section.weight
        self.facts = examine_once(self.file, cache)
        self.manifest: Manifest | None = read_manifest(self.file.prefix)
        self.checksums = _checksums(self.file, self.manifest)
        self.first, self.last = bounds or (0, len(self.file))
        self.document_weights = None
        if section.document_weights:
            self.document_weights = read_document_weights(section.document_weights, self.file)
        self.labels = TokenFile(section.labels) if section.labels else None
        if self.labels and not np.array_equal(self.labels.sizes, self.file.sizes):
            rule = f"its documents must have the sizes of the documents of {section.path}"
            fix = "make the label file together with the token file, document by document"
            raise DataError(section.labels, rule, fix)

        self.label_checksums = _checksums(self.labels, read_manifest(self.labels.prefix)) if self.labels else None

    @property
    def grows(self) -> bool:
        """Whether its tokens are still being made, so that their number is not known."""
        return False

    def check(self, spans: tuple[TokenRange, ...]) -> None:
        """Check the index entries and blocks of these tokens before they are read.

        Raises:
            DamagedTokens: they are damaged.
        """
        file, width = self.file, self.file.dtype.itemsize
        last = len(file) - 1
        for document, start, length in spans:
            end = int(file.offsets[document]) + int(file.sizes[document]) * width
            if end != (file.offsets[document + 1] if document < last else file.tokens * width):
                raise DamagedTokens(file.idx_path, document, "its entry differs from its neighbours'")
            if self.checksums is not None:
                self.checksums.check(document, start, length)
            if self.label_checksums is not None:
                self.label_checksums.check(document, start, length)

    @cached_property
    def weights_hash(self) -> str | None:
        """Hash of the documents' weights, computed once."""
        return None if self.document_weights is None else content_hash(self.document_weights)

    @property
    def identity(self) -> str:
        """Equal for entries of different phases that are the same source, also if a stream ends while they are
        opened. `data.split`, which cuts a file, goes with one file only."""
        return os.path.abspath(self.file.prefix)

    def check_ids(self, vocabulary: int) -> None:
        """Refuse ids that the model has no embedding for, if they are known without reading everything."""
        largest = self.facts["largest"]
        if largest is None and self.manifest is not None:
            largest = self.manifest.largest
        smallest = self.facts["smallest"] or 0
        if largest is not None and (largest >= vocabulary or smallest < 0):
            rule = f"it has ids {smallest} ... {largest}, but model.vocab_size is {vocabulary}"
            fix = "use the tokenizer that the file was made with, and its vocabulary size"
            raise DataError(self.file.bin_path, rule, fix)

    def order(self, data: DataSection, sequence_length: int, samples: int | None, epochs: int | None) -> Order:
        """The order of its samples. pythia needs the number of samples, or epochs, that will be read."""
        where = (self.file, self.first, self.last, sequence_length)
        known = {"fingerprint": self.facts["fingerprint"], "cache": data.cache}
        if data.packing in ("best_fit", "unpacked"):
            if data.order in ("pythia", "window"):
                rule = f"{data.packing} packs whole documents, and the {data.order} order cuts them"
                raise DataError("data.packing", rule, "use data.order: stream (shuffled) or sequential")
            drawn = data.seed if data.order == "stream" else None
            return PackedOrder(*where, drawn, apart=data.packing == "unpacked", drop_long=data.drop_long, **known)
        if data.packing == "until_overflow":
            if data.order != "pythia":
                raise DataError("data.packing", "until_overflow is GPT-NeoX's", "use data.order: pythia, or best_fit")
            known |= {"drop_long": data.drop_long, "labels": self.labels}
            return OverflowOrder(*where, data.seed, samples=samples, epochs=epochs, **known)
        if data.order == "pythia":
            return PythiaOrder(*where, data.seed, samples=samples, epochs=epochs, **known)
        if data.order == "window":
            return WindowOrder(*where, data.seed, data.window)
        return StreamOrder(*where, data.seed) if data.order == "stream" else SequentialOrder(*where)


def _checksums(file: TokenFile, manifest: Manifest | None) -> BlockChecksums | None:
    return BlockChecksums(file, manifest.blocks) if manifest is not None and manifest.blocks is not None else None


def read_document_weights(path: str, file: TokenFile) -> np.ndarray:
    """The weights of a file's documents, one number each, memory-mapped.

    Raises:
        DataError: they cannot be read, have another count than the documents, or are no numbers of at least 0 in fp32's
            range.
    """
    fix = "write them with numpy.save, one number for each document of the token file"
    try:
        weights = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise DataError(path, f"document weights cannot be read: {error}", fix) from error
    if not isinstance(weights, np.ndarray) or weights.shape != (len(file),) or weights.dtype.kind not in "fiub":
        found = f"{weights.dtype} {list(weights.shape)}" if isinstance(weights, np.ndarray) else "several arrays"
        raise DataError(path, f"it must have one number for each of {len(file)} documents, and has {found}", fix)
    largest = np.finfo(np.float32).max
    for begin in range(0, len(weights), PIECE):
        part = weights[begin : begin + PIECE]
        if not ((part >= 0) & (part <= largest)).all():
            raise DataError(path, "each weight must be a finite number of at least 0", fix)
    return weights


class OrderedSource:
    """A source with its order.

    Attributes:
        index: its number in the plan.
    """

    def __init__(self, index: int, opened: SourceFile, order: Order, vocabulary: int):
        self.index, self.order, self.vocabulary = index, order, vocabulary
        self.opened, self.file, self.name = opened, opened.file, opened.name

    @property
    def leaves_room(self) -> bool:
        """Whether its pieces may not fill a sample."""
        return isinstance(self.order, PackedOrder)

    def sample(
        self, sample: int, options: AssemblyOptions, number: int, counts: float, by_document: bool = True
    ) -> Sample:
        """Sample k of this source as sample n of the run.

        Args:
            sample: k.
            number: n.
            counts: weight of each of its labels.
            by_document: multiply by the documents' weights, if any.

        Raises:
            DataError: an id that the model has no embedding for, or a label that contradicts its token.
        """
        spans = tuple(self.order.spans(sample))
        self.opened.check(spans)
        pieces, targets = [self.file.read(*span) for span in spans], self._targets(spans, counts, by_document)
        made = assemble(pieces, options, number, targets, counts)
        low, high = int(made.tokens.min()), int(made.tokens.max())
        if low < 0 or high >= self.vocabulary:
            rule = f"sample {number} has ids {low} ... {high}, but model.vocab_size is {self.vocabulary}"
            fix = "use the tokenizer that the file was made with, and its vocabulary size"
            raise DataError(self.file.bin_path, rule, fix)
        lead = None if options.reorders else self._lead(spans[0], options)
        return Sample(made.tokens, made.weights, made.begins, self.index, spans, lead)

    def _lead(self, span: TokenRange, options: AssemblyOptions) -> np.ndarray | None:
        length = min(span.start, options.context)
        if not length:
            return None
        self.opened.check((TokenRange(span.document, span.start - length, length),))
        tokens = self.file.read(span.document, span.start - length, length)
        ends = np.flatnonzero(tokens == options.eod) if options.eod is not None else np.empty(0, np.int64)
        return tokens[ends[-1] + 1 :] if len(ends) else tokens

    def _targets(self, spans: tuple[TokenRange, ...], counts: float, by_document: bool) -> np.ndarray | None:
        """The weight of each token, without `counts`."""
        targets = self._labelled(spans) if counts else None
        if not by_document or self.opened.document_weights is None:
            return targets
        documents, lengths = [span.document for span in spans], [span.length for span in spans]
        weights = np.repeat(self.opened.document_weights[documents].astype(np.float32), lengths)
        return weights if targets is None else weights * targets

    def _labelled(self, spans: tuple[TokenRange, ...]) -> np.ndarray | None:
        if self.opened.labels is None:
            return None
        labels = np.concatenate([self.opened.labels.read(*span) for span in spans])
        tokens = np.concatenate([self.file.read(*span) for span in spans])
        if (wrong := (labels != IGNORED) & (labels != tokens)).any():
            rule = f"a label ({labels[wrong][0]}) is neither {IGNORED} nor its token ({tokens[wrong][0]})"
            raise DataError(self.opened.labels.bin_path, rule, "make the label file from the same tokens")
        return labels != IGNORED
