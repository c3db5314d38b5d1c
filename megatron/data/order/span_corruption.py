"""Span corruption: spans of a document are taken out of it, and are to be written behind it.

Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer" (2020), arXiv
1910.10683, for a decoder: of a b c d e f g with the spans "b c" and "f" becomes a <0> d e <1> g <0> b c <1> f. How many
tokens and spans are taken, and where, is T5's rule (`random_spans_noise_mask` in its preprocessors).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron.config.arithmetic.span_lengths import span_sizes


@dataclass(frozen=True)
class Corruption:
    """How documents are corrupted.

    Attributes:
        rate: share of the documents.
        density: share of a document's tokens that are taken out.
        mean: tokens of a span, on average.
        sentinels: ids that stand for spans, in order; a document has no more spans than there are.
        targets_only: of a corrupted document only what stands behind it is a target.
    """

    rate: float
    density: float
    mean: float
    sentinels: tuple[int, ...]
    targets_only: bool = True

    def sizes(self, length: int, most: int | None = None) -> tuple[int, int]:
        """(tokens that are taken out of so many, spans that they make, at most `most`)."""
        spans = len(self.sentinels) if most is None else min(most, len(self.sentinels))
        return span_sizes(length, self.density, self.mean, spans)


def _parts(items: int, count: int, draw: np.random.Generator) -> np.ndarray:
    """Lengths of at least 1 of `count` parts of `items`; all such lists are equally likely."""
    cuts = np.sort(draw.choice(items - 1, count - 1, replace=False)) + 1
    return np.diff([0, *cuts, items])


def noise_mask(length: int, options: Corruption, draw: np.random.Generator, most: int | None = None) -> np.ndarray:
    """Which of so many tokens are taken out, bool; they begin with one that stays and end with one that does not."""
    noise, spans = options.sizes(length, most)
    if not spans:
        return np.zeros(length, bool)
    taken, kept = _parts(noise, spans, draw), _parts(length - noise, spans, draw)
    return np.repeat(np.arange(2 * spans) % 2 == 1, np.stack([kept, taken], 1).flatten())


def corrupt(
    tokens: np.ndarray, options: Corruption, draw: np.random.Generator, most: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """A document's tokens without its spans, then the spans; and which of these tokens are targets. It becomes longer
    by two tokens per span.

    Args:
        most: spans that it may have; with none it stays as it is.
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
