"""The cutting of tensors done the slow way, element by element, to compare with."""

from __future__ import annotations

import numpy as np

from megatron.parallel.layout.shard import LogicalTensor


def owner(unit: int, units: int, ranks: int) -> int:
    """The rank that has a unit of a part: the one whose range [r*u/n, (r+1)*u/n), rounded down, it lies in."""
    return next(rank for rank in range(ranks) if (rank * units) // ranks <= unit < ((rank + 1) * units) // ranks)


def local_shard(values: np.ndarray, tensor: LogicalTensor, rank: int, ranks: int) -> np.ndarray:
    """The flattened shard of a logical array: keep, of the cut dimension, the indices whose unit is this rank's."""
    shard = tensor.shard
    if shard is None or ranks == 1:  # with columns too, an owner of the whole is rank 0 of 1
        return values.reshape(-1).copy()
    if shard.across is not None:  # rank r * columns + c has the c-th of equal runs
        values = np.split(values, shard.columns, axis=shard.across)[rank % shard.columns]
        if shard.across == shard.dim:
            return values.reshape(-1).copy()
        rank, ranks = rank // shard.columns, ranks // shard.columns
    kept, begin = [], 0
    for part in shard.parts or (tensor.shape[shard.dim],):
        kept += [begin + i for i in range(part) if owner(i // shard.unit, part // shard.unit, ranks) == rank]
        begin += part
    return np.take(values, np.array(kept, dtype=np.int64), axis=shard.dim).reshape(-1)


def cuts(size: int, owners: int, odd: int = 0) -> list[tuple[int, int]]:
    """[0, size) in `owners` ranges, some maybe empty. `odd` moves the cuts to odd places."""
    places = sorted({0, size} | {min(size, max(0, size * k // owners + (odd * k) % 3 - 1)) for k in range(1, owners)})
    return list(zip(places[:-1], places[1:], strict=True))
