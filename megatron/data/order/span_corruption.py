"""Span corruption: spans are removed from a document, and must be predicted after it.

Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer" (2020), arXiv
1910.10683, for a decoder: a b c d e f g with the spans "b c" and "f" becomes a <0> d e <1> g <0> b c <1> f. The numbers
and places of removed tokens and spans follow T5's rule (`random_spans_noise_mask` in its preprocessors).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron.config.arithmetic.epochs import span_sizes


@dataclass(frozen=True)
class Corruption:
    """Options of the corruption.

    Attributes:
        rate: share of the documents.
        density: share of a document's tokens that are removed.
        mean: tokens of a span, on average.
        sentinels: ids that replace spans, in order, and so the largest number of spans in a document.
        targets_only: of a corrupted document only the removed spans are targets.
    """

    rate: float
    density: float
    mean: float
    sentinels: tuple[int, ...]
    targets_only: bool = True

    def sizes(self, length: int, most: int | None = None) -> tuple[int, int]:
        """(tokens to remove from `length`, number of their spans, at most `most`)."""
        spans = len(self.sentinels) if most is None else min(most, len(self.sentinels))
        return span_sizes(length, self.density, self.mean, spans)


def _parts(items: int, count: int, draw: np.random.Generator) -> np.ndarray:
    """Lengths of at least 1 of `count` parts of `items`. All such lists are equally likely."""
    cuts = np.sort(draw.choice(items - 1, count - 1, replace=False)) + 1
    return np.diff([0, *cuts, items])


def noise_mask(length: int, options: Corruption, draw: np.random.Generator, most: int | None = None) -> np.ndarray:
    """Mask of removed tokens, bool [length]. The first token stays and the last one is removed."""
    noise, spans = options.sizes(length, most)
    if not spans:
        return np.zeros(length, bool)
    taken, kept = _parts(noise, spans, draw), _parts(length - noise, spans, draw)
    return np.repeat(np.arange(2 * spans) % 2 == 1, np.stack([kept, taken], 1).flatten())


def corrupt(
    tokens: np.ndarray, options: Corruption, draw: np.random.Generator, most: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """A document's tokens without its spans, then the spans, and which of these tokens are targets. Each span adds two
    tokens.

    Args:
        most: largest number of spans. With 0 the document stays unchanged.
    """
    mask = noise_mask(len(tokens), options, draw, most)
    if not mask.any():
        return tokens, np.ones(len(tokens), bool)
    first = mask & ~np.concatenate([[False], mask[:-1]])  # of each span
    sentinels = np.asarray(options.sentinels[: int(first.sum())], dtype=tokens.dtype)
    text = tokens.copy()
    text[first] = sentinels
    text = text[~mask | first]
    spans = np.insert(tokens[mask], np.flatnonzero(first[mask]), sentinels)
    targets = np.arange(len(text) + len(spans)) >= (len(text) if options.targets_only else 0)
    return np.concatenate([text, spans]), targets
