"""A kind of stages: options, rules about them, and work on one document, or keys by which documents are compared."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatron.config.problems import Problem
from megatron.config.section import Section


class Removed(NamedTuple):
    """Why a stage removes a document."""

    reason: str  # the same text for all documents that are removed for it
    detail: str = ""  # what is this document's own, such as a value


class Noted(NamedTuple):
    """A count about a document that a stage keeps."""

    what: str  # is counted, the same text for all documents
    number: int = 1


Work = Callable[[Any], Removed | Noted | None]  # of a datatrove Document, which it may change
Keys = Callable[[Any], np.ndarray | None]  # uint64 [bands, 2], or None for a document that is compared with none
Parts = Callable[[Any], np.ndarray]  # uint64 [lines of the text], 0 for a line that is compared with none


@dataclass(frozen=True)
class StageKind:
    """A kind of stages. Exactly one of `work`, `keys` and `parts` is given.

    Attributes:
        options: its keys.
        work: from the options, a function of one document. A task makes it once.
        keys: from the options, the keys of a document. Documents that share the key of a band are duplicates.
        parts: from the options, the keys of a document's lines. Of lines with the same key one is kept.
        files: files and folders that the stage reads, in addition to documents.
        rules: mistakes in the options that their types do not show. It gets the options, their key and their place.
    """

    options: type[Section]
    work: Callable[[Any], Work] | None = None
    keys: Callable[[Any], Keys] | None = None
    parts: Callable[[Any], Parts] | None = None
    files: Callable[[Any], Iterable[str]] = lambda options: ()
    rules: Callable[[Any, str, str], Iterable[Problem]] = lambda options, key, where: ()
