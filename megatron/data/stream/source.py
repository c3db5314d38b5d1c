"""A stream as a source of a blend."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from ..manifest import Manifest
from ..order.order import TokenRange
from ..source import SourceFile
from ..tokenizer import tokenizer_for
from .tokens import StreamedFile

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.config.sections.data import SourceSection


def open_source(section: SourceSection, config: Config) -> SourceFile:
    """The source of a stream: a plain token file where it has been tokenised to its end.

    Raises:
        DataError: tokens of other texts are there.
    """
    found = StreamedSource(section, config)
    return found if found.file.whole is None else SourceFile(section, config.data.cache)


class StreamedSource(SourceFile):
    """A stream that may still be tokenised."""

    file: StreamedFile

    def __init__(self, section: SourceSection, config: Config):
        chosen = config.tokenizer
        if section.tokenizer is not None:
            chosen = chosen.model_copy(update={"path": section.tokenizer})
        options, tokenizer = config.data.streaming, tokenizer_for(chosen, True)
        settings = {
            "stream": section.stream,
            "shards": section.shards,
            "prefix": os.path.abspath(section.path),
            "tokenizer": chosen.model_dump(mode="json"),
            "key": options.text,
            "workers": options.workers,
        }
        self.file = StreamedFile(settings, tokenizer, options.patience)
        self.name, self.path = section.name, section.path
        self.counts = section.loss_weight if section.loss else 0.0
        self.loss, self.weight = section.loss, section.weight
        self.facts = {"largest": None, "smallest": None, "fingerprint": self.file.key}
        self.manifest = Manifest(tokenizer.facts, 0, 0, 0, self.file.dtype.name, "", "")
        self.first, self.last = 0, sys.maxsize
        self.document_weights = self.labels = self.checksums = self.label_checksums = None

    @property
    def grows(self) -> bool:
        return self.file.whole is None

    def check(self, spans: tuple[TokenRange, ...]) -> None:
        """Growing files have no checksums yet."""
