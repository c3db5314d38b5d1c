"""How much longer span corruption makes a document, and how much of them a sample therefore reads. No numpy here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
