"""Samples of a step and those before it (`training.batch_schedule`), and steps of some epochs. No torch.

`training.global_batch_size` is the batch of the last stage. The schedule says what earlier steps have instead. All
other code asks this file for the first sample of a step: it is the sum of the batches before it."""

import math
import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, BinaryIO

from ..file_access import unreadable
from ..problems import RuleError


@dataclass(frozen=True)
class Batches:
    """Batch sizes by step."""

    sizes: tuple[int, ...]  # samples of a step in each stage
    begins: tuple[int, ...] = (0,)  # first step of each stage, from 0. The last stage has no end.

    @cached_property
    def _firsts(self) -> list[int]:
        """Samples before each stage."""
        steps = (end - begin for begin, end in zip(self.begins, self.begins[1:]))
        return list(accumulate((size * count for size, count in zip(self.sizes, steps)), initial=0))

    def stage(self, step: int) -> int:
        """Number of the stage of update `step`, from 0."""
        return bisect_right(self.begins, step) - 1

    def size(self, step: int) -> int:
        """Samples of update `step`, from 0."""
        return self.sizes[self.stage(step)]

    def before(self, step: int) -> int:
        """Samples of all updates before `step`: the number of its first sample."""
        stage = self.stage(step)
        return self._firsts[stage] + (step - self.begins[stage]) * self.sizes[stage]

    def step(self, sample: int) -> int:
        """The update that reads a sample, and so the number of whole batches in that number of samples."""
        stage = bisect_right(self._firsts, sample) - 1
        return self.begins[stage] + (sample - self._firsts[stage]) // self.sizes[stage]

    def times(self, shares: int) -> "Batches":
        """The batches of this number of runs that read as much each."""
        return Batches(tuple(size * shares for size in self.sizes), self.begins)

    def counts(self, steps: int) -> Iterator[tuple[int, int]]:
        """(samples of a step, number of steps) of each stage of a run of `steps`."""
        for size, begin, end in zip(self.sizes, self.begins, (*self.begins[1:], steps)):
            if begin < min(end, steps):
                yield size, min(end, steps) - begin

    def steps_of(self, tokens: float, length: int, start: int = 0) -> float:
        """Steps from update `start` on that read a number of tokens, in samples of `length`. It may be a fraction."""
        done, first = 0.0, self.stage(start)
        for size, begin, end in zip(self.sizes[first:], self.begins[first:], self.begins[first + 1 :]):
            steps = end - max(begin, start)
            if tokens <= steps * size * length:
                return done + tokens / (size * length)
            done, tokens = done + steps, tokens - steps * size * length
        return done + tokens / (self.sizes[-1] * length)

    @property
    def common(self) -> int:
        """Greatest common divisor of all sizes: what a layout divides, each of them divides."""
        return math.gcd(*self.sizes)

    def __str__(self) -> str:
        return " to ".join(f"{each:,}" for each in sorted({min(self.sizes), max(self.sizes)}))


def batches_of(config: Any) -> Batches:
    """The batch sizes of a resolved configuration."""
    training = config.training
    return batches_by(training.global_batch_size, training.batch_schedule, training.sequence_length)


def batches_by(last: int, schedule: Sequence[Any], length: int) -> Batches:
    """Batch sizes from the values of three keys, which rules need not have checked.

    Args:
        last: `training.global_batch_size`.
        schedule: sections, or their plain values.
        length: `training.sequence_length`. A stage that ends at a number of tokens ends with the batch that has them.
    """
    sizes, begins, samples = list[int](), [0], 0
    for entry in schedule:
        values = entry if isinstance(entry, dict) else entry.model_dump()
        until, size = values.get("until"), values["global_batch_size"]
        if until is None:
            missing = max((values.get("until_tokens") or 0) - samples * length, 0)
            until = begins[-1] - (-missing // (size * length))
        begins.append(max(until, begins[-1]))
        samples += (begins[-1] - begins[-2]) * size
        sizes.append(size)
    return Batches((*sizes, last), tuple(begins))


SECTION = "data.span_corruption"


def span_sizes(length: int, density: float, mean: float, most: int) -> tuple[int, int]:
    """(number of corrupted tokens of `length`, number of their spans, at most `most`), as T5 counts them. Zeros for
    less than two tokens."""
    if length < 2 or most < 1:
        return 0, 0
    noise = min(max(round(length * density), 1), length - 1)
    return noise, min(max(round(noise / mean), 1), noise, length - noise, most)


def grown(length: int, density: float, mean: float, most: int) -> int:
    """Tokens of a corrupted document of a given length: each span has a sentinel in its place and one before it."""
    return length + 2 * span_sizes(length, density, mean, most)[1]


def fitting(room: int, density: float, mean: float, most: int) -> int:
    """The most tokens of one document that have room when they are corrupted."""
    length = room
    while grown(length, density, mean, most) > room:
        length -= 1
    return length


def tokens_read(at: Callable[[str], Any]) -> int:
    """New tokens that a training sample reads of its documents: `training.sequence_length`, or fewer where these grow.

    Args:
        at: the value of a dotted key.
    """
    length = at("training.sequence_length")
    if not at(f"{SECTION}.rate"):
        return length
    sizes = (at(f"{SECTION}.{name}") for name in ("noise_density", "mean_span_length", "sentinels"))
    return max(fitting(length + 1, *sizes) - 1, 1)


HEADER = struct.Struct("<9sQBQQ")  # data/token_file.py has the format
WIDTHS = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}  # code of a type of token ids -> bytes
_CHUNK = 1 << 22  # bytes of sizes that are read together


class Uncounted(RuleError):
    """The steps are not known."""


class Unread(Uncounted):
    """The token files cannot be read here."""


def document_bounds(shares: list[float], documents: int) -> list[int]:
    """GPT-NeoX's cut of documents into training, validation and test: four bounds, the first 0, the last `documents`.

    Args:
        shares: three numbers of at least 0, not all 0.
    """
    total = 0.0
    for share in shares:  # not `sum`, which corrects rounding since Python 3.12
        total += share
    bounds = [0]
    for share in shares:
        bounds.append(bounds[-1] + int(round(share / total * float(documents))))
    excess = bounds[-1] - documents
    return [0, *(bound - excess for bound in bounds[1:])]


def steps_of_epochs(at: Callable[[str], Any]) -> int:
    """`training.steps` of a configuration that has `training.epochs`, counted from the indices of the token files.

    An epoch has the samples of all sources of `data.train` together. Orders that repeat themselves end it with the last
    whole part of a batch (`data.epoch_parts`), as GPT-NeoX's data loader does.

    Args:
        at: the value of a dotted key. Sources are mappings or sections.

    Raises:
        Uncounted: with the reason.
    """
    epochs, batch = at("training.epochs"), at("training.global_batch_size")
    if batch is None:
        raise Uncounted(
            "must go with a known batch: without training.global_batch_size it follows from the number of ranks",
            "give training.global_batch_size, or --ranks N",
            "training.epochs",
        )
    parts = at("data.epoch_parts")
    if batch % parts:
        raise Uncounted(
            f"must divide training.global_batch_size, which is {batch}",
            "use 1, or GPT-NeoX's gradient_accumulation_steps",
            "data.epoch_parts",
        )
    if (
        at("data.synthetic") != "none"
        or at("data.phases")
        or at("data.packing") != "continuous"
        or not at("data.train")
    ):
        raise Uncounted(
            "must go with token files in data.train that are packed continuously, without data.phases: only their "
            "samples are counted before the start",
            "give training.steps instead",
            "training.epochs",
        )
    shares, unit = at("data.split"), batch // parts
    paths = (source["path"] if isinstance(source, dict) else source.path for source in at("data.train"))
    samples = sum(_samples(path or "", shares, at) for path in paths)  # a stream gets its own later
    whole = samples if at("data.order") in ("stream", "window") else samples // unit * unit
    schedule, length = at("training.batch_schedule") or (), at("training.sequence_length")
    steps = batches_by(batch, schedule, length).step(whole * epochs)
    if not steps:
        raise Uncounted(
            f"must make at least one step: {epochs} of {samples} samples are fewer than a batch of {batch}",
            "use more epochs, or a smaller training.global_batch_size",
            "training.epochs",
        )
    return steps


def _samples(path: str, shares: list[float] | None, at: Callable[[str], Any]) -> int:
    """Samples that a pass over one source has, before its order repeats itself."""
    length, order = tokens_read(at), at("data.order")
    with _index(path, shares) as (file, last, tokens):
        rows = order != "pythia" and tokens == last * (length + 1) and _all(file, last, length + 1)
    pieces = last if rows else (tokens - 1) // length
    return max(0, pieces - (order == "pythia"))  # whose last shuffled piece is read by later epochs at most


def training_tokens(path: str, shares: list[float] | None) -> int:
    """Tokens of a source that training reads, with `data.split` as `shares`.

    Raises:
        Unread: the index is missing or damaged.
    """
    with _index(path, shares) as (_, _, tokens):
        return tokens


@contextmanager
def _index(path: str, shares: list[float] | None) -> Iterator[tuple[BinaryIO, int, int]]:
    """The open index of a token file, its documents for training, and their tokens."""
    prefix = path[:-4] if path.endswith((".bin", ".idx")) else path
    index = prefix + ".idx"
    if reason := unreadable(index):
        raise Unread(f"must be counted from the token files, and of {index} {reason}", STEPS, "training.epochs")
    with open(index, "rb") as file:
        head = file.read(HEADER.size)
        magic, _, code, documents, _ = HEADER.unpack(head) if len(head) == HEADER.size else (b"", 0, 0, 0, 0)
        if magic != b"MMIDIDX\x00\x00" or code not in WIDTHS or os.path.getsize(index) < HEADER.size + 12 * documents:
            raise Unread(f"must be counted from the token files, and {index} is damaged", STEPS, "training.epochs")
        last = documents
        if shares is not None:
            padded = ([float(share) for share in shares] + [0.0, 0.0])[:3]
            last = document_bounds(padded, documents)[1] if min(padded) >= 0 and sum(padded) > 0 else 0
        yield file, last, _tokens_before(file, documents, last, WIDTHS[code])


STEPS = "give training.steps instead, or check data.train"


def _tokens_before(file: Any, documents: int, last: int, width: int) -> int:
    """Tokens of the first `last` documents: where the last of them ends."""
    if last < 1:
        return 0
    file.seek(HEADER.size + 4 * (last - 1))
    (size,) = struct.unpack("<i", file.read(4))
    file.seek(HEADER.size + 4 * documents + 8 * (last - 1))
    (offset,) = struct.unpack("<q", file.read(8))
    return offset // width + size


def _all(file: Any, count: int, size: int) -> bool:
    """Whether the first `count` documents have `size` tokens each."""
    file.seek(HEADER.size)
    left, pattern = 4 * count, struct.pack("<i", size) * (_CHUNK // 4)
    while left:
        chunk = file.read(min(left, _CHUNK))
        if not chunk or chunk != pattern[: len(chunk)]:
            return False
        left -= len(chunk)
    return True
