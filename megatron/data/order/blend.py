"""The order in which a blend takes samples from its sources, as in GPT-NeoX.

Draw t takes the source with the largest `weight * max(t, 1) - draws so far`, in double precision, the first of equal
ones. That is a loop over all draws. Here it runs over many blocks of draws in parallel. The state before draw t is the
number of draws of each source. Each block starts from a guess of that state with some draws of run-in, since guesses
soon converge to the true course. A block's result is kept only if its start equals the end of the block before it.
Other blocks are run again from the right state."""

import os

import numpy as np

from .cache import Arrays, cached

BLOCK = 4096  # draws between two kept counts
_TOGETHER = 1 << 14  # blocks that are simulated side by side
_RUN_IN = 256  # draws per source from a guessed state before a block begins


def normalised_weights(weights: list[float]) -> np.ndarray:
    """Weights divided by their sum, added up from the left: float64 [D].

    Not `sum`: since Python 3.12 it corrects rounding, so the order would depend on the version of Python."""
    total = 0.0
    for weight in weights:
        total += weight
    return np.array([weight / total for weight in weights], dtype=np.float64)


def neox_weights(weights: list[float]) -> np.ndarray:
    """GPT-NeoX's weights of draws: float64 [D].

    It divides by the sum twice: in Python for the number of samples of each source, and in NumPy for the blend. After
    the first division the sum is not always exactly 1. The second one may then change last digits and, for about one
    set of weights in ten, the order of some draws."""
    once = normalised_weights(weights)
    return once / np.sum(once)


def weights_by_documents(counts: list[int], alpha: float) -> list[float]:
    """GPT-NeoX's weights by number of documents (weight_by_num_documents), in its order of operations.

    For a source with the share p of all documents, the weight is p ** alpha, normalised, times 1 - p, normalised. The
    second factor makes it less than proportional even with alpha 1: [100, 300, 600] documents give 0.167, 0.389, 0.444.

    Args:
        counts: documents of each source.
        alpha: weighted_sampler_alpha.
    """
    if len(counts) == 1:
        return [1.0]
    shares = [count / sum(counts) for count in counts]
    smoothed = normalised_weights([share**alpha for share in shares]).tolist()
    return normalised_weights([each * (1 - share) for each, share in zip(smoothed, shares)]).tolist()


def draw(
    weights: np.ndarray, counts: np.ndarray, first: np.ndarray, draws: int, keep: np.ndarray | None = None
) -> np.ndarray:
    """Make `draws` draws of several courses in parallel.

    Args:
        weights: float64 [D].
        counts: float64 [K, D], draws so far of each course, not changed.
        first: int64 [K], number t of each course's next draw.
        keep: [K, draws], filled with the sources drawn.

    Returns:
        float64 [K, D], the counts afterwards.
    """
    counts, rows = counts.copy(), np.arange(len(first))
    scores = np.empty_like(counts)
    for step in range(draws):
        times = np.maximum(first + step, 1).astype(np.float64)
        np.multiply(times[:, None], weights, out=scores)
        scores -= counts
        chosen = scores.argmax(axis=1)
        counts[rows, chosen] += 1
        if keep is not None:
            keep[:, step] = chosen
    return counts


def guess(weights: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Counts near the true ones after `draws` draws: float64 [K, D], integers that add up to `draws`."""
    ideal = np.outer(draws.astype(np.float64), weights)
    counts = np.floor(ideal)
    missing = (draws - counts.sum(axis=1)).astype(np.int64)
    order = np.argsort(counts - ideal, axis=1, kind="stable")  # largest remainder first
    rank = np.argsort(order, axis=1, kind="stable")
    return counts + (rank < missing[:, None])


def build_arrays(weights: np.ndarray, size: int) -> Arrays:
    """All draws of a blend.

    Returns:
        sources: uint8 (uint16 from 255 sources on) [size], the source of each draw.
        counts: int64 [ceil(size / BLOCK), D], draws of each source before every BLOCK-th draw.
    """
    blocks, kinds = max(1, -(-size // BLOCK)), len(weights)
    dtype = np.uint8 if kinds < 255 else np.uint16
    sources = np.empty((blocks, min(BLOCK, size)), dtype)
    starts = np.zeros((blocks + 1, kinds), np.float64)
    for begin in range(0, blocks, _TOGETHER):
        _simulate(weights, sources, starts, begin, min(begin + _TOGETHER, blocks))
    return {"sources": sources.reshape(-1)[:size], "counts": starts[:blocks].astype(np.int64)}


def _simulate(weights: np.ndarray, sources: np.ndarray, starts: np.ndarray, begin: int, end: int) -> None:
    """Fill blocks begin ... end-1 from the state at `starts[begin]`, and the state after each."""
    run_in = min(_RUN_IN * len(weights), BLOCK)
    first = np.arange(begin, end, dtype=np.int64) * BLOCK
    if end - begin > 1:
        early = first[1:] - run_in
        starts[begin + 1 : end] = draw(weights, guess(weights, early), early, run_in)
    pending = np.arange(begin, end)
    ends = np.empty((end - begin, len(weights)))
    while len(pending):
        part = np.empty((len(pending), sources.shape[1]), sources.dtype)
        ends[pending - begin] = draw(weights, starts[pending], first[pending - begin], sources.shape[1], part)
        sources[pending] = part
        wrong = np.flatnonzero((ends[:-1] != starts[begin + 1 : end]).any(axis=1)) + begin + 1
        starts[wrong] = ends[wrong - 1 - begin]
        pending = wrong
    starts[end] = ends[-1]


class Blend:
    """A table of draws: draw t takes sample `count` of `source`."""

    def __init__(
        self, weights: list[float], size: int, cache: str | os.PathLike | None = None, *, as_neox: bool = True
    ):
        """Args:
        weights: of the sources, not all zero.
        size: draws.
        cache: folder of the table. None makes it in memory.
        as_neox: normalise the weights as GPT-NeoX does, to the last digit. Otherwise divide by their sum once."""
        self.weights, self.size = neox_weights(weights) if as_neox else normalised_weights(weights), size
        if len(weights) == 1:
            return
        key = tuple(weight.hex() for weight in self.weights.tolist())
        arrays = cached(cache, "blend", (key, size), lambda: build_arrays(self.weights, size))
        self.sources, self.counts = arrays["sources"], arrays["counts"]

    def locate(self, draw: int) -> tuple[int, int]:
        """The source of a draw, and the number of its earlier draws."""
        if len(self.weights) == 1:
            return 0, draw
        source = int(self.sources[draw])
        return source, self.drawn(source, draw)

    def drawn(self, source: int, draws: int) -> int:
        """Number of a source's draws among the first `draws`."""
        if len(self.weights) == 1:
            return draws
        block = min(draws // BLOCK, len(self.counts) - 1)
        return int(self.counts[block, source]) + int(np.count_nonzero(self.sources[block * BLOCK : draws] == source))

    def find(self, source: int, count: int) -> int | None:
        """The draw that takes sample `count` of a source. None if the table ends before it."""
        if len(self.weights) == 1:
            return count if count < self.size else None
        block = int(np.searchsorted(self.counts[:, source], count, side="right")) - 1
        places = np.flatnonzero(self.sources[block * BLOCK : (block + 1) * BLOCK] == source)
        inside = count - int(self.counts[block, source])
        return block * BLOCK + int(places[inside]) if inside < len(places) else None
