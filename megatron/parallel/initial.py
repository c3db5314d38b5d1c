"""Initial values: a function of (seed, logical name), whatever the layout.

A tensor is cut into tiles of fixed size. Each tile has its own counter-based stream (Philox, keyed by seed,
name and tile), so a rank makes only the tiles that overlap its shard, any shard of any layout has the same
values, and no rank needs memory for more than one tile beyond its own shard.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator
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
        formula: formula: takes one int64 array per dimension of the logical tensor, which broadcast to the shape of
            what is asked for, and gives the elements at those indices.
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
    """A stream of random numbers that belongs to these words alone."""
    text = "/".join(str(word) for word in (seed, *words))
    key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key))


def initial_values(
    tensor: LogicalTensor, init: Init, seed: int, rank: int = 0, ranks: int = 1, experts: Span | None = None
) -> torch.Tensor:
    """The fp32 values of the shard that `rank` of `ranks` tensor parallel ranks owns (of these experts), of the local
    shape.
    """
    shape = tensor.local_shape(rank, ranks, experts)
    if init.kind == "constant":
        return torch.full(shape, init.value, dtype=torch.float32)
    out = np.empty(shape, dtype=np.float32)
    spans = tensor.spans(rank, ranks, experts)
    if init.kind == "orthogonal":
        whole = _orthogonal(tensor, init.value, seed)
        for pieces in itertools.product(*spans):
            target = tuple(slice(p.local, p.local + p.length) for p in pieces)
            out[target] = whole[tuple(slice(p.start, p.stop) for p in pieces)]
        return torch.from_numpy(out)
    if init.kind == "formula":
        for pieces in itertools.product(*spans):
            indices = np.ogrid[tuple(slice(p.start, p.stop) for p in pieces)]
            out[tuple(slice(p.local, p.local + p.length) for p in pieces)] = init.formula(*indices)
        return torch.from_numpy(out)
    for pieces in itertools.product(*spans):
        for tile in _tiles(tensor.shape, pieces):
            _copy_tile(out, tensor, init, seed, pieces, tile)
    return torch.from_numpy(out)


def _tile_size(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Tiles are TILE x TILE in the last two dimensions (TILE**2 of a vector) and 1 in those before."""
    if len(shape) == 1:
        return (TILE * TILE,)
    return (1,) * (len(shape) - 2) + (TILE, TILE)


def _tiles(shape: tuple[int, ...], pieces) -> Iterator[tuple[int, ...]]:
    ranges = [
        range(piece.start // size, -(-piece.stop // size)) if piece.length else range(0)
        for piece, size in zip(pieces, _tile_size(shape))
    ]
    return itertools.product(*ranges)


def _copy_tile(out: np.ndarray, tensor: LogicalTensor, init: Init, seed: int, pieces, tile: tuple[int, ...]) -> None:
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


def _orthogonal(tensor: LogicalTensor, gain: float, seed: int) -> np.ndarray:
    """Each fused matrix gets orthonormal rows or columns (Saxe et al. 2013), whichever are fewer."""
    stacked = tensor.matrices is not None and len(tensor.shape) == 3  # experts [E, rows, columns]: those of each
    matrices = tensor.matrices or (tensor.shape[0],)
    width = tensor.shape[2] if stacked else math.prod(tensor.shape[1:])
    blocks = []
    for index, rows in enumerate(matrices * (tensor.shape[0] if stacked else 1)):
        normal = generator(seed, tensor.name, "orthogonal", index).standard_normal((max(rows, width), min(rows, width)))
        q, r = np.linalg.qr(normal)
        q = q * np.sign(np.diag(r))
        blocks.append((q if rows >= width else q.T) * gain)
    return np.concatenate(blocks).reshape(tensor.shape).astype(np.float32)
