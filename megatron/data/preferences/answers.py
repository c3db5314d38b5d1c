"""Token files of answers, each document one answer behind its prompt, and samples that are made of such documents."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from megatron.config.problems import UserError

from ..errors import DataError
from ..hashing import generator
from ..sample import IGNORED, Sample
from ..token_file import TokenFile

ENDINGS = ("", "_labels", "_reference")  # of the keys of one file of answers


class Answers:
    """A token file, its label file (-100: no label) and the log-probabilities of its tokens under a reference.

    Raises:
        DataError: they do not match.
    """

    def __init__(self, path: str, labels: str | None = None, reference: str | None = None):
        self.path, self.tokens = path, TokenFile(path)
        self.labels = None if labels is None else TokenFile(labels)
        if self.labels is not None and not np.array_equal(self.labels.sizes, self.tokens.sizes):
            raise DataError(path, "its label file has documents of other sizes", "make a label for each token")
        self.reference = None if reference is None else _reference(reference, self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def sizes(self) -> np.ndarray:
        return self.tokens.sizes.astype(np.int64)

    def counts(self, document: int) -> np.ndarray:
        """Whether each token of a document is a label that counts. The first one follows from another document.

        Raises:
            DataError: a label is neither its token nor masked.
        """
        found = np.ones(int(self.tokens.sizes[document]), bool)
        if self.labels is not None:
            labels, tokens = self.labels[document], self.tokens[document]
            found = labels != IGNORED
            if (wrong := found & (labels != tokens)).any():
                rule = f"a label of document {document} ({labels[wrong][0]}) is neither {IGNORED} nor its token"
                raise DataError(self.labels.bin_path, rule, "make the label file from the same tokens")
        found[:1] = False
        return found

    def reference_of(self, document: int) -> np.ndarray | None:
        if self.reference is None:
            return None
        (first,) = self.tokens.starts(slice(document, document + 1))
        return self.reference[int(first) : int(first) + int(self.tokens.sizes[document])]


def answers_of(options: Mapping[str, Any], name: str) -> Answers:
    """The files of a side in `data.options`: `name`, and optionally `name`_labels and `name`_reference.

    Raises:
        UserError: there is no path.
    """
    path, labels, reference = (options.get(name + ending) for ending in ENDINGS)
    if not isinstance(path, str):
        raise UserError(f"data.options.{name} must be the path of a token file, without .bin or .idx")
    for ending, given in zip(ENDINGS[1:], (labels, reference)):
        if not isinstance(given, str | None):
            raise UserError(f"data.options.{name}{ending} must be a path, not {given!r}")
    return Answers(path, labels, reference)


def options_of(options: Mapping[str, Any], name: str, keys: frozenset[str]) -> Mapping[str, Any]:
    """The options of a set. The validation set has its own ones under the key `validation`.

    Raises:
        UserError: there are none, or an unknown one.
    """
    found = {key: value for key, value in options.items() if key != "validation"}
    if name != "train":
        held_out = options.get("validation")
        if not isinstance(held_out, Mapping):
            raise UserError(f"data.options.{name} must have files of its own, or nothing must be evaluated")
        found = dict(held_out)
    if unknown := sorted(found.keys() - keys):
        raise UserError(f"data.options must not have {', '.join(unknown)}: use {', '.join(sorted(keys))}")
    return found


def check_lengths(sizes: np.ndarray, length: int, what: str, spare: int = 0, shorter: str = "") -> None:
    """Refuse what has more than the S + 1 tokens of a sample, less `spare`.

    Args:
        shorter: how to make what has fewer tokens. Default: remove it.

    Raises:
        DataError: with the number of long ones.
    """
    room = length + 1 - spare
    if (long := int((sizes > room).sum())) > 0:
        rule = f"{long} of {len(sizes)} {what} have more than the {room} tokens of a sample, up to {sizes.max()}"
        subject = "training.sequence_length"
        raise DataError(subject, rule, f"use at least {sizes.max() - 1 + spare}, or {shorter or f'remove long {what}'}")


def sample_of(documents: Sequence[tuple[Answers, int]], length: int, filler: int) -> Sample:
    """A sample [S] of some documents, one behind the other, filled up with labels that do not count.

    Labels weigh one over their number in the sample. The column `sequence` numbers the documents from 0, and -1 is a
    label that does not count. The column `reference` is there if all files have one."""
    width = length + 1
    tokens = np.full(width, filler, np.int64)
    begins, counts, begin = np.zeros(width, bool), np.zeros(width, bool), 0
    columns = {"sequence": np.full(width, -1, np.float32), "reference": np.zeros(width, np.float32)}
    for index, (file, document) in enumerate(documents):
        own = file.tokens[document]
        here = slice(begin, begin + len(own))
        tokens[here], counts[here], columns["sequence"][here] = own, file.counts(document), index
        begins[begin] = True
        if (reference := file.reference_of(document)) is None:
            columns.pop("reference", None)
        elif "reference" in columns:
            columns["reference"][here] = reference
        begin += len(own)
    if begin < width:
        begins[begin] = True
    weights = counts[1:].astype(np.float32) / max(1, int(counts.sum()))
    for name, each in columns.items():
        columns[name] = np.where(counts, each, -1 if name == "sequence" else 0)[1:].astype(np.float32)
    return Sample(tokens, weights, begins, columns=columns)


@lru_cache(maxsize=4)
def order_of(seed: int, word: str, epoch: int, count: int) -> np.ndarray:
    """The order of a pass."""
    return generator(seed, word, epoch).permutation(count)


def _reference(path: str, file: TokenFile) -> np.ndarray:
    """Log-probabilities, one for each token of the file, memory-mapped."""
    found = numbers_of(path, file.tokens, "token")
    if not (found <= 0).all():
        raise DataError(path, "each log-probability must be a finite number of at most 0", "record it again")
    return found


def numbers_of(path: str, count: int, what: str) -> np.ndarray:
    """One finite number for each token or document of a file, memory-mapped.

    Raises:
        DataError: it has others.
    """
    fix = f"write them with numpy.save, one number for each {what} of the token file"
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(path, f"numbers of {what}s cannot be read: {error}", fix) from error
    if not isinstance(found, np.ndarray) or found.shape != (count,) or found.dtype.kind != "f":
        raise DataError(path, f"it must have one number for each of {count} {what}s", fix)
    if not np.isfinite(found).all():
        raise DataError(path, f"the number of each {what} must be finite", fix)
    return found
