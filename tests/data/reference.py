"""Sample orders written as plainly as possible, one token and one draw at a time, to compare with."""

from __future__ import annotations

import functools
import operator

import numpy as np

from megatron.data.order.pythia import PythiaOrder


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


def pack_until_overflow(
    documents: list[list[int]],
    labels: list[list[int]] | None,
    samples: int,
    length: int,
    seed: int,
    allow_chopped: bool = True,
) -> list[tuple[list[int], list[bool]]]:
    """GPT-NeoX's pack_until_overflow, document by document: tokens and targets of each sample of the set's length, N-1.

    The sample made last is incomplete, so reading it fails there, and the first sample of the set is read in its place.
    """
    random, width = np.random.RandomState(seed), length + 1
    shuffled = np.arange(samples)
    random.shuffle(shuffled)
    order = np.arange(len(documents))
    random.shuffle(order)
    used, begins, room, at = [], [], None, 0
    while len(begins) < samples:
        document = int(order[at])
        size = len(documents[document])
        at += 1
        if at == len(order):
            at = 0
            random.shuffle(order)
        if not allow_chopped and size > width:
            continue
        if labels is not None and all(label == -100 for label in labels[document][:width]):
            continue
        if room is None or room == width or size > room:
            begins.append(len(used))
            room = width
        room -= size
        used.append(document)

    def read(number: int) -> tuple[list[int], list[bool]]:
        piece = int(shuffled[number])
        if piece == samples - 1:
            return read(piece % (samples - 1))
        first, after = begins[piece], begins[piece + 1]
        tokens = [token for document in used[first:after] for token in documents[document]]
        tokens = (tokens + documents[used[after]][:1])[:width]
        counted = [True] * width
        if labels is not None:
            flat = [label for document in used[first:after] for label in labels[document]]
            flat = (flat + labels[used[after]][:1])[:width]
            counted = [label != -100 for label in flat] + [False] * (width - len(flat))
        return tokens + [0] * (width - len(tokens)), counted

    return [read(number) for number in range(samples - 1)]


def sample_index(order: PythiaOrder) -> np.ndarray:
    """GPT-NeoX's sample_idx [N+1, 2]: entry of `documents` and offset of each piece's begin, and of the end."""
    sizes = np.ascontiguousarray(order.file.sizes)[order.documents]
    cumulated = np.concatenate([[0], np.cumsum(sizes[:-1], dtype=np.int64)])
    positions = np.arange(len(order.pieces) + 1, dtype=np.int64) * order.sequence_length
    entries = np.searchsorted(cumulated, positions, side="right") - 1
    index = np.stack([entries, positions - cumulated[entries]], axis=1)
    return index.astype(np.int32 if 2 * len(index) < 2**31 - 1 else np.int64)
