"""Sample orders written as plainly as possible, one token and one draw at a time, to compare with."""

from __future__ import annotations

import functools
import operator

import numpy as np


def flat_samples(
    documents: list[list[int]], sequence_length: int, seed: int, samples: int | None = None, epochs: int | None = None
) -> tuple[list[list[int]], int]:
    """All pieces in shuffled order, token by token, and the number that a pass has (the last one is not counted)."""
    tokens = sum(len(document) for document in documents)
    if epochs is None:
        epochs = 1
        while (epochs * tokens - 1) // sequence_length < samples:
            epochs += 1
    random = np.random.RandomState(seed)
    order = np.array([index for _ in range(epochs) for index in range(len(documents))])
    random.shuffle(order)
    stream = [token for index in order for token in documents[index]]
    pieces, begin = [], 0
    while begin + sequence_length + 1 <= len(stream):
        pieces.append(stream[begin : begin + sequence_length + 1])
        begin += sequence_length
    places = np.arange(len(pieces))
    random.shuffle(places)
    return [pieces[place] for place in places], len(pieces) - 1


def neox_weights(weights: list[float]) -> list[float]:
    """GPT-NeoX's weights: divided by Python's sum for the numbers of samples, then by NumPy's for the blend."""
    total = functools.reduce(operator.add, weights, 0.0)
    array = np.array([weight / total for weight in weights], dtype=np.float64)
    array /= np.sum(array)
    return array.tolist()


def weights_by_documents(counts: list[int], alpha: float) -> list[float]:
    """GPT-NeoX's weight_by_num_documents, from its description."""
    if len(counts) == 1:
        return [1.0]
    total = functools.reduce(operator.add, counts)
    share = [count / total for count in counts]
    power = [each**alpha for each in share]
    whole = functools.reduce(operator.add, power)
    product = [each / whole * (1 - part) for each, part in zip(power, share)]
    whole = functools.reduce(operator.add, product)
    return [each / whole for each in product]


def blend(weights: list[float], size: int) -> tuple[list[int], list[int]]:
    """GPT-NeoX's choice of sources: source and its sample, for each draw."""
    counts, sources, samples = [0] * len(weights), [], []
    for draw in range(size):
        scale = max(float(draw), 1.0)
        best, largest = 0, weights[0] * scale - counts[0]
        for source in range(1, len(weights)):
            error = weights[source] * scale - counts[source]
            if error > largest:
                best, largest = source, error
        sources.append(best)
        samples.append(counts[best])
        counts[best] += 1
    return sources, samples


def best_fit(lengths: list[int], width: int) -> int:
    """The number of bins that best-fit decreasing needs, piece by piece."""
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [(space, index) for index, space in enumerate(room) if space >= length]
        if fitting:
            room[min(fitting)[1]] -= length
        else:
            room.append(width - length)
    return len(room)
