"""AxoNN's model of communication: a matrix over a grid of rows, columns and depth, and data parallel copies. No torch.

Singh et al. (2025, arXiv 2502.08145, section 5): the fully connected layers of a transformer, each with a weight of
K H x H, in bf16; volumes of ring algorithms over measured bandwidths, without latency and overlap. It finds the grid
that communicates least; this project's own layouts are its rows or columns (tensor), depth (ZeRO 3) and data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GIB = 2**30
BYTES = 2
LAYERS = ((3, False), (1, True), (4, False), (4, True))  # of a block: (K, whether rows and columns change places)

# GiB/s by (product of the sizes of the inner groups, own size), as measured; None is any other size.
Table = Mapping[int | None, Mapping[int | None, float]]
PERLMUTTER: Table = {1: {2: 76, 4: 225, None: 80}, 2: {2: 76, None: 40}, None: {None: 20}}
FRONTIER: Table = {
    1: {2: 129, 4: 52, 8: 135, None: 40},
    2: {2: 50, 4: 72, None: 20},
    4: {2: 36, None: 10},
    None: {None: 5},
}


@dataclass(frozen=True)
class AxonnGrid:
    """Sizes of the groups, the product of which is the number of devices."""

    row: int
    column: int
    depth: int
    data: int


@dataclass(frozen=True)
class AxonnWork:
    """A transformer and its batch: blocks, width, samples, tokens of a sample."""

    blocks: int
    hidden: int
    batch: int
    length: int = 2048


def bandwidth(table: Table, inner: int, own: int) -> float:
    """GiB/s of a group of `own` ranks that lies around groups of `inner` ranks in all."""
    row = table.get(inner, table[None])
    return row.get(own, row[None])


def seconds(table: Table, work: AxonnWork, grid: AxonnGrid, accumulation: int = 1) -> float:
    """Communication of one step."""
    r, c, d, n = grid.row, grid.column, grid.depth, grid.data
    tokens = work.batch / n / d * work.length
    total = 0.0
    for factor, transposed in LAYERS:
        weight, wide = factor * work.hidden**2, factor * work.hidden
        data = 4 * (n - 1) / n * weight / (c * r * d) * BYTES
        depth = 3 * (d - 1) / d * weight / (c * r) * BYTES * accumulation
        if transposed:
            row = 4 * (r - 1) / r * (tokens * wide / c) * BYTES
            column = 2 * (c - 1) / c * (tokens * work.hidden / r) * BYTES
        else:
            row = 2 * (r - 1) / r * (tokens * work.hidden / c) * BYTES
            column = 4 * (c - 1) / c * (tokens * wide / r) * BYTES
        total += column / GIB / bandwidth(table, 1, c) + row / GIB / bandwidth(table, c, r)
        total += depth / GIB / bandwidth(table, c * r, d) + data / GIB / bandwidth(table, c * r * d, n)
    return work.blocks * total


def best(table: Table, work: AxonnWork, devices: int, least: int = 1) -> list[tuple[float, AxonnGrid]]:
    """All grids of powers of two, the fastest first; `least` devices at least hold a copy of the model."""
    sizes = [2**power for power in range(devices.bit_length()) if 2**power <= devices]
    grids = [
        AxonnGrid(r, c, d, devices // (r * c * d))
        for c in sizes
        for r in sizes
        for d in sizes
        if devices % (r * c * d) == 0 and r * c * d >= least and work.batch % (devices // (r * c)) == 0
    ]
    return sorted(((seconds(table, work, grid), grid) for grid in grids), key=lambda each: each[0])
