"""The text that a model read at each step, from the run's configuration and its token files."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config import Config
from megatron.config.sequences import stage_at

from .corpus.files import read_origin
from .errors import DataError
from .hashing import batch_hash, sample_hash
from .manifest import read_manifest
from .order.order import TokenRange
from .plan import SyntheticPlan
from .plan_builder import build_plan
from .skipped_batches import LeftOut
from .token_file import TokenFile


def run_config(run: str | os.PathLike) -> Config:
    """The resolved configuration of a run, from its directory or its config.yml.

    Raises:
        DataError: there is none.
        ConfigError: it is damaged or was edited.
    """
    from megatron.config import read_resolved

    path = config_file(run)
    if not path.is_file():
        raise DataError(path, "there is no resolved configuration", "give a run's directory")
    return read_resolved(path)


def config_file(run: str | os.PathLike) -> Path:
    """The resolved configuration in a run's directory, or the given file."""
    return Path(run) / "config.yml" if Path(run).is_dir() else Path(run)


@dataclass(frozen=True)
class TextPiece:
    """A piece of a sequence."""

    source: str  # source, file: the source's name and the token file's prefix
    file: str
    document: int  # document, start, length: tokens start ... start + length of that document.
    start: int
    length: int
    # The file that the document was made from, if known. `input_start` and `input_length` are its position there in
    # `unit`: "bytes" of the uncompressed content (of the whole record), or "rows".
    input: str | None = None
    unit: str | None = None
    input_start: int | None = None
    input_length: int | None = None


@dataclass(frozen=True)
class Sequence:
    """A sequence of a step: its place in the global batch, and the data parallel rank and micro-batch that read it."""

    index: int
    number: int
    rank: int
    micro_batch: int
    hash: int
    pieces: list[TextPiece]
    tokens: np.ndarray


class Origins:
    """Origins of a token file's documents."""

    def __init__(self, file: TokenFile):
        self.table, self.manifest = read_origin(file.prefix), read_manifest(file.prefix)
        if self.table is not None and len(self.table) != len(file):
            rule = f"its table of origins has {len(self.table)} documents, the index {len(file)}"
            raise DataError(file.prefix, rule, "make the pair again, or remove the table")

    def of(self, document: int) -> dict[str, Any]:
        """The origin's fields of a `TextPiece`. Empty if unknown."""
        if self.table is None or self.manifest is None:
            return {}
        row = self.table[document]
        entry = self.manifest.inputs[int(row["input"])]
        return {
            "input": entry["name"],
            "unit": entry["unit"],
            "input_start": int(row["start"]),
            "input_length": int(row["length"]),
        }


class Provenance:
    """Finds the text of steps, and the steps of a text, for one set of a run.

    Args:
        left_out: batches that the run skipped (`megatron.report.ledger.left_out` reads them). Default: `data.left_out`.

    Attributes:
        plan: the samples.
        data_ranks: data parallel ranks that the run was resolved for.
    """

    def __init__(
        self, config: Config, split: str = "train", name: str | None = None, left_out: LeftOut | None = None
    ) -> None:
        self.config, self.plan = config, build_plan(config, split, name)
        found = LeftOut.given(config) if left_out is None else left_out
        self.left_out, self._trains = found if split == "train" else LeftOut(), split == "train"
        self._skipped = self.left_out.in_samples(self.plan.batches)
        training = config.training
        self.data_ranks = training.global_batch_size // (training.micro_batch_size * (training.accumulation or 1))
        self._origins = lru_cache(None)(lambda source: Origins(self.plan.sources[source].file))

    def step(self, step: int, rank: int | None = None) -> list[Sequence]:
        """The sequences of a step, or of one data parallel rank, in the order of the global batch.

        Raises:
            DataError: there is no such step or rank.
        """
        if not 0 <= step < self.plan.steps:
            raise DataError("--step", f"there is no step {step}", f"give 0 ... {self.plan.steps - 1}")
        if rank is not None and not 0 <= rank < self.data_ranks:
            rule = f"there is no data parallel rank {rank} of {self.data_ranks}"
            raise DataError("--rank", rule, f"give 0 ... {self.data_ranks - 1}")
        micro, (pieces, length) = self.config.training.micro_batch_size, self._cut(step)
        found = []
        for index in range(self.plan.batches.size(step)):
            own, pass_number = index // micro % self.data_ranks, index // micro // self.data_ranks
            if rank not in (None, own):
                continue
            number = self.number(step, index)
            sample = self.plan.sample(number)
            for piece in range(pieces):
                place, tokens = index * pieces + piece, sample.tokens[piece * length : (piece + 1) * length + 1]
                spans = sample.spans if self._moved else tuple(_part(sample.spans, piece * length, length + 1))
                numbers = (place, number * pieces + piece, own, pass_number, sample_hash(place, tokens))
                found.append(Sequence(*numbers, self._pieces(sample.source, spans), tokens))
        return found

    def number(self, step: int, index: int) -> int:
        """The sample at a place of a step's global batch."""
        return self._skipped.batch(self.plan.batches.before(step) + index)

    def _cut(self, step: int) -> tuple[int, int]:
        """Number and length of the pieces of each sample in a step. See `data.subsequences`."""
        longest = self.config.training.sequence_length
        if not self._trains:
            return 1, longest
        stage = stage_at(self.config, step)
        return stage.pieces, stage.length

    @property
    def _moved(self) -> bool:
        """Whether samples reorder the tokens of documents, so that a token's piece is unknown."""
        return self._trains and (self.config.data.fim.rate > 0 or self.config.data.span_corruption.rate > 0)

    def _pieces(self, source: int, spans: tuple[TokenRange, ...]) -> list[TextPiece]:
        found = []
        for span in spans:
            opened = self.plan.sources[source]
            found.append(
                TextPiece(opened.name, str(opened.file.prefix), *span, **self._origins(source).of(span.document))
            )
        return found

    def source(self, name: str) -> int:
        """The number of the source with a name.

        Raises:
            DataError: there is none, or several.
        """
        if isinstance(self.plan, SyntheticPlan):
            raise DataError("data.synthetic", "this run makes its data: there are no documents", "batch.py shows steps")
        found = [source.index for source in self.plan.sources if source.name == name or str(source.file.prefix) == name]
        if len(found) != 1:
            names = ", ".join(source.name for source in self.plan.sources)
            rule = f"{len(found)} sources are called {name!r}, and there are {names}"
            raise DataError("--document", rule, "give the path of the token file")
        return found[0]

    def origin(self, source: int, document: int) -> dict[str, Any]:
        """The input that a document was made from, with the names of a `TextPiece`. Empty if unknown."""
        return self._origins(source).of(document)

    def seen(self, source: int, document: int, start: int = 0, length: int | None = None) -> list[tuple[int, int]]:
        """The steps that read (a part of) a document, as (step, index in the global batch), in order.

        Args:
            start, length: only sequences with some of these tokens count.

        Raises:
            DataError: there is no such document.
        """
        file = self.plan.sources[source].file
        if not 0 <= document < len(file):
            raise DataError(
                "--document", f"{file.prefix} has documents 0 ... {len(file) - 1}, not {document}", "give one of these"
            )
        end = start + (int(file.sizes[document]) - start if length is None else length)
        places = self._places(source, document, start, end)
        return sorted({(step, index) for step, index, _ in places})

    def readings(self, source: int, document: int, start: int, end: int) -> Iterator[tuple[int, TokenRange]]:
        """The run's reads of tokens start ... end-1 of a document and around them, as (step, tokens), unordered."""
        for step, _, span in self._places(source, document, start, end):
            yield step, span

    def _places(self, source: int, document: int, start: int, end: int) -> Iterator[tuple[int, int, TokenRange]]:
        """(step, position in the global batch, piece of the document) of each sequence with some of these tokens."""
        for number, begin, span in self._readings(source, document, start, end):
            position = self._skipped.step(number)
            if position is None or (step := self.plan.batches.step(position)) >= self.plan.steps:
                continue
            pieces, length = self._cut(step)
            for piece in range(pieces):
                place = (position - self.plan.batches.before(step)) * pieces + piece
                own = [span] if self._moved else _part([span], piece * length - begin, length + 1)
                yield from ((step, place, each) for each in own if _overlaps(each, document, start, end))

    def _readings(self, source: int, document: int, start: int, end: int) -> Iterator[tuple[int, int, TokenRange]]:
        """(sample, position in it, piece of the document) for each sample with some of these tokens."""
        plan = self.plan
        if isinstance(plan, SyntheticPlan):
            return
        below = plan.batches.before(plan.steps) + self._skipped.total
        order = plan.sources[source].order
        for sample in order.find(document, plan.highest(source, below)):
            whole = order.spans(sample)
            begins = accumulate((span.length for span in whole), initial=0)
            spans = [each for each in zip(begins, whole) if _overlaps(each[1], document, start, end)]
            if spans:
                yield from ((number, *each) for number in plan.numbers(source, sample, below) for each in spans)


def _part(spans: Iterable[TokenRange], begin: int, length: int) -> Iterator[TokenRange]:
    """Tokens begin ... begin + length - 1 of consecutive pieces. `begin` may be below 0."""
    at = 0
    for span in spans:
        first, last = max(begin, at), min(begin + length, at + span.length)
        if first < last:
            yield TokenRange(span.document, span.start + first - at, last - first)
        at += span.length


def _overlaps(span: TokenRange, document: int, start: int, end: int) -> bool:
    return span.document == document and span.start < end and start < span.start + span.length


def step_hash(sequences: list[Sequence]) -> int:
    """The hash of a step (or of a rank's part of it), as in the run's ledger and metrics."""
    return batch_hash(sequence.hash for sequence in sequences)
