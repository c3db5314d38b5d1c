"""Initial values: a function of (seed, logical name), whatever the layout.

A tensor is cut into tiles of fixed size. Each tile has its own counter-based stream (Philox, keyed by seed, name and
tile), so any shard of any layout has the same values. A rank makes only the tiles that overlap its shard, and needs
memory for one more tile in each thread. Orthogonal matrices are the exception: each element depends on all others, so a
rank makes the whole of each matrix that it has a part of, one after the other."""

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from .shard import LogicalTensor, Span

TILE = 1024


@dataclass(frozen=True)
class Init:
    """How a tensor starts.

    Attributes:
        kind: normal(0, value), uniform(-value, value), between(low, value), constant(value), orthogonal with gain
            `value`, or a formula of the indices.
        value: the parameter of the kind.
        low: lower end of between.
        then: between: applied to the drawn numbers, elementwise, in float64.
        formula: formula: takes one int64 array of indices per dimension of the logical tensor, which broadcast to one
            shape, and gives the elements there.
    """

    kind: Literal["normal", "uniform", "between", "constant", "orthogonal", "formula"]
    value: float = 0.0
    low: float = 0.0
    then: Callable[[np.ndarray], np.ndarray] | None = None
    formula: Callable[..., np.ndarray] | None = None


ZEROS, ONES = Init("constant", 0.0), Init("constant", 1.0)


def formula(function: Callable[..., np.ndarray]) -> Init:
    """Each element is `function` of its indices in the logical tensor."""
    return Init("formula", formula=function)


def time_steps(low: float, high: float, floor: float) -> Init:
    """Biases b whose time steps softplus(b) are log-uniform in [low, high] and at least `floor` (Gu and Dao 2023)."""

    def inverse_softplus(logarithms: np.ndarray) -> np.ndarray:
        steps = np.maximum(np.exp(logarithms), floor)
        return steps + np.log(-np.expm1(-steps))

    return Init("between", math.log(high), math.log(low), then=inverse_softplus)


def generator(seed: int, *words: object) -> np.random.Generator:
    """The stream of random numbers of these words."""
    text = "/".join(str(word) for word in (seed, *words))
    key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key))


def initial_values(
    tensor: LogicalTensor, init: Init, seed: int, rank: int = 0, ranks: int = 1, run: Span | None = None
) -> torch.Tensor:
    """The fp32 values of the shard that `rank` of `ranks` tensor parallel ranks owns, or of a run of it."""
    shape = tensor.local_shape(rank, ranks, run)
    if init.kind == "constant":
        return torch.full(shape, init.value, dtype=torch.float32)
    out = np.empty(shape, dtype=np.float32)
    spans = tensor.spans(rank, ranks, run)
    if init.kind == "orthogonal":
        _fill_orthogonal(out, tensor, init.value, seed, spans)
        return torch.from_numpy(out)
    if init.formula is not None:
        for pieces in itertools.product(*spans):
            indices = np.ogrid[tuple(slice(p.start, p.stop) for p in pieces)]
            out[tuple(slice(p.local, p.local + p.length) for p in pieces)] = init.formula(*indices)
        return torch.from_numpy(out)
    parts = [(pieces, tile) for pieces in itertools.product(*spans) for tile in _tiles(tensor.shape, pieces)]
    with ThreadPoolExecutor(min(torch.get_num_threads(), len(parts)) or 1) as pool:  # numpy draws without Python's lock
        for _ in pool.map(lambda part: _copy_tile(out, tensor, init, seed, *part), parts):
            pass
    return torch.from_numpy(out)


def _tile_size(shape: tuple[int, ...]) -> tuple[int, ...]:
    """TILE x TILE in the last two dimensions (TILE**2 of a vector) and 1 in the others."""
    if len(shape) == 1:
        return (TILE * TILE,)
    return (1,) * (len(shape) - 2) + (TILE, TILE)


def _tiles(shape: tuple[int, ...], pieces: Sequence[Span]) -> Iterator[tuple[int, ...]]:
    ranges = [
        range(piece.start // size, -(-piece.stop // size)) if piece.length else range(0)
        for piece, size in zip(pieces, _tile_size(shape))
    ]
    return itertools.product(*ranges)


def _copy_tile(
    out: np.ndarray, tensor: LogicalTensor, init: Init, seed: int, pieces: Sequence[Span], tile: tuple[int, ...]
) -> None:
    size = _tile_size(tensor.shape)
    begin = [index * length for index, length in zip(tile, size)]
    end = [min(b + length, whole) for b, length, whole in zip(begin, size, tensor.shape)]
    values = _draw(init, generator(seed, tensor.name, *tile), tuple(e - b for b, e in zip(begin, end)))
    source, target = [], []
    for piece, b, e in zip(pieces, begin, end):
        low, high = max(piece.start, b), min(piece.stop, e)
        source.append(slice(low - b, high - b))
        target.append(slice(piece.local + low - piece.start, piece.local + high - piece.start))
    out[tuple(target)] = values[tuple(source)]


def _draw(init: Init, stream: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    if init.kind == "normal":
        return stream.standard_normal(shape, dtype=np.float32) * np.float32(init.value)
    if init.kind == "between":
        drawn = init.low + (init.value - init.low) * stream.random(shape)
        return (drawn if init.then is None else init.then(drawn)).astype(np.float32)
    return (stream.random(shape, dtype=np.float32) * np.float32(2) - np.float32(1)) * np.float32(init.value)


def _fill_orthogonal(out: np.ndarray, tensor: LogicalTensor, gain: float, seed: int, spans: list[list[Span]]) -> None:
    """Each fused matrix, and each expert's, gets orthonormal rows or columns, whichever are fewer (Saxe et al.
    2013)."""
    rows = 1 if tensor.stacked else 0  # the dimension along which matrices are fused
    shape, matrices = tensor.shape[rows:], tensor.matrices or (tensor.shape[rows],)
    number = 0
    for expert in range(tensor.shape[0] if tensor.stacked else 1):
        begin = 0
        for height in matrices:
            overlapping = [
                pieces
                for pieces in itertools.product(*spans)
                if pieces[rows].start < begin + height
                and pieces[rows].stop > begin
                and (not rows or pieces[0].start <= expert < pieces[0].stop)
            ]
            if overlapping:
                stream = generator(seed, tensor.name, "orthogonal", number)
                matrix = _orthogonal(stream, height, math.prod(shape[1:]), gain).reshape(height, *shape[1:])
            for pieces in overlapping:
                piece, *others = pieces[rows:]
                low, high = max(piece.start, begin), min(piece.stop, begin + height)
                place = [slice(piece.local + low - piece.start, piece.local + high - piece.start)]
                place += [slice(other.local, other.local + other.length) for other in others]
                chosen = matrix[(slice(low - begin, high - begin), *(slice(p.start, p.stop) for p in others))]
                (out[pieces[0].local + expert - pieces[0].start] if rows else out)[tuple(place)] = chosen
            begin, number = begin + height, number + 1


def _orthogonal(stream: np.random.Generator, rows: int, columns: int, gain: float) -> np.ndarray:
    normal = stream.standard_normal((max(rows, columns), min(rows, columns)))
    q, r = np.linalg.qr(normal)
    q = q * np.sign(np.diag(r))
    return (q if rows >= columns else q.T) * gain
