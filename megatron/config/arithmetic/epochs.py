"""How many optimizer steps some epochs of the training data are, counted from the indices of the token files.

An epoch has the samples of all sources of `data.train` together. Orders that repeat themselves end it with the
last whole part of a batch (`data.epoch_parts`), as GPT-NeoX's data loader does.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from ..file_access import unreadable
from .batches import batches_by

SECTION = "data.span_corruption"


def span_sizes(length: int, density: float, mean: float, most: int) -> tuple[int, int]:
    """(number of corrupted tokens of `length`, number of their spans, at most `most`), as T5 counts them. Zeros for
    less than two tokens.
    """
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


class Uncounted(Exception):
    """The steps are not known.

    Attributes:
        key: the key to fix.
        rule, fix: of the message.
    """

    def __init__(self, key: str, rule: str, fix: str):
        super().__init__(rule)
        self.key, self.rule, self.fix = key, rule, fix


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
    """`training.steps` of a configuration that has `training.epochs`.

    Args:
        at: the value of a dotted key. Sources are mappings or sections.

    Raises:
        Uncounted: with the reason.
    """
    epochs, batch = at("training.epochs"), at("training.global_batch_size")
    if batch is None:
        raise Uncounted(
            "training.epochs",
            "must go with a known batch: without training.global_batch_size it follows from the number of ranks",
            "give training.global_batch_size, or --ranks N",
        )
    parts = at("data.epoch_parts")
    if batch % parts:
        raise Uncounted(
            "data.epoch_parts",
            f"must divide training.global_batch_size, which is {batch}",
            "use 1, or GPT-NeoX's gradient_accumulation_steps",
        )
    if (
        at("data.synthetic") != "none"
        or at("data.phases")
        or at("data.packing") != "continuous"
        or not at("data.train")
    ):
        raise Uncounted(
            "training.epochs",
            "must go with token files in data.train that are packed continuously, without data.phases: only their "
            "samples are counted before the start",
            "give training.steps instead",
        )
    shares, unit = at("data.split"), batch // parts
    samples = sum(_samples(_path(source), shares, at) for source in at("data.train"))
    whole = samples if at("data.order") in ("stream", "window") else samples // unit * unit
    schedule, length = at("training.batch_schedule") or (), at("training.sequence_length")
    steps = batches_by(batch, schedule, length).step(whole * epochs)
    if not steps:
        raise Uncounted(
            "training.epochs",
            f"must make at least one step: {epochs} of {samples} samples are fewer than a batch of {batch}",
            "use more epochs, or a smaller training.global_batch_size",
        )
    return steps


def _path(source: Any) -> str:
    """Prefix of a source's token file, or nothing: a stream gets its own later."""
    return (source["path"] if isinstance(source, dict) else source.path) or ""


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
        raise Unread("training.epochs", f"must be counted from the token files, and of {index} {reason}", STEPS)
    with open(index, "rb") as file:
        head = file.read(HEADER.size)
        magic, _, code, documents, _ = HEADER.unpack(head) if len(head) == HEADER.size else (b"", 0, 0, 0, 0)
        if magic != b"MMIDIDX\x00\x00" or code not in WIDTHS or os.path.getsize(index) < HEADER.size + 12 * documents:
            raise Unread("training.epochs", f"must be counted from the token files, and {index} is damaged", STEPS)
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
