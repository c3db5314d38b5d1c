"""SparseLoCo's compression against a loop over chunks written from the formulas, and its exact sums."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.features.peers.sparse import (
    Sparse,
    accumulate,
    bytes_of,
    clipped_to_median,
    compress,
    decompress,
    kept,
    norm_of,
    pack_indices,
    unpack_indices,
)

SHAPES = [(64, 128), (2, 64, 64), (5000,), (70, 130), (3,), (4096,)]


def drawn(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def chunk_of(shape: tuple[int, ...], flat: int) -> int:
    """The chunk of an element, by its row and column."""
    columns, rows = shape[-1], math.prod(shape[:-1])
    if len(shape) > 1 and rows % 64 == 0 and columns % 64 == 0:
        row, column = divmod(flat, columns)
        return row // 64 * (columns // 64) + column // 64
    return flat // 4096


def published(values: torch.Tensor, k: int) -> torch.Tensor:
    """Top-k of each chunk, and the quantiser of 4 bins over 6 standard deviations, element by element."""
    flat, shape = values.flatten().tolist(), tuple(values.shape)
    members: dict[int, list[int]] = {}
    for place in range(len(flat)):
        members.setdefault(chunk_of(shape, place), []).append(place)
    chosen = []
    for places in members.values():
        count = k if len(places) == 4096 else math.ceil(k * len(places) / 4096)
        chosen += sorted(places, key=lambda place: -abs(flat[place]))[:count]
    shift = sum(flat[place] for place in chosen) / len(chosen)
    spread = math.sqrt(sum((flat[place] - shift) ** 2 for place in chosen) / max(len(chosen) - 1, 1))
    bins: dict[int, list[int]] = {}
    for place in chosen:
        code = round((flat[place] - shift) / (6 * spread / 4 or 1.0) + 2)
        bins.setdefault(min(max(code, 0), 3), []).append(place)
    sent = torch.zeros(len(flat), dtype=torch.float64)
    for places in bins.values():
        for place in places:
            sent[place] = sum(flat[each] for each in places) / len(places)
    return sent.view(shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_published_one(shape):
    values = accumulate(torch.zeros(shape), drawn(shape), 0.95)
    sent = decompress(compress(values, 64), shape, 64, torch.float64)
    # The four values are rounded to 2^-22 of the largest magnitude, and are at most that large.
    torch.testing.assert_close(sent, published(values.double(), 64), rtol=0, atol=2.0**-21 * float(values.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sent_and_kept_add_up_exactly(shape, dtype):
    residual = torch.zeros(shape, dtype=dtype)
    for step in range(4):
        whole = accumulate(residual, drawn(shape, step, dtype) * 10.0**-step, 0.95)
        sparse = compress(whole, 64)
        assert sparse.fits(shape, 64)
        sent = decompress(sparse, shape, 64, dtype)
        residual = whole - sent
        assert torch.equal(residual + sent, whole)
        assert torch.equal(residual.double(), whole.double() - sent.double())


def test_bytes_are_those_of_the_formula():
    for shape in SHAPES:
        sparse = compress(accumulate(torch.zeros(shape), drawn(shape), 0.95), 64)
        parts = (sparse.indices, sparse.codes, sparse.table)
        assert sum(each.numel() * each.element_size() for each in parts) == bytes_of(shape, 64)
    assert kept((5000,), 64) == 64 + math.ceil(904 * 64 / 4096)
    whole = (4096, 4096)
    assert bytes_of(whole, 64) == 4096 * 64 * 14 // 8 + 16 and math.prod(whole) * 4 / bytes_of(whole, 64) > 140


def test_indices_and_codes_are_packed_without_loss():
    indices = torch.arange(4096)[torch.randperm(4096, generator=torch.Generator().manual_seed(1))]
    for count in (1, 2, 3, 4096):
        packed = pack_indices(indices[:count])
        assert len(packed) == math.ceil(1.5 * count) and torch.equal(unpack_indices(packed, count), indices[:count])
    # torch.topk's places 0xABC and 0x123: low byte, high and low half bytes, high byte, as published
    assert pack_indices(torch.tensor([0xABC, 0x123])).tolist() == [0xBC, 0x3A, 0x12]


def test_damaged_ones_do_not_fit():
    good = compress(accumulate(torch.zeros(5000), drawn((5000,)), 0.95), 64)
    assert good.fits((5000,), 64) and not good.fits((4500,), 64) and not good.fits((5000,), 63)
    twice = unpack_indices(good.indices, kept((5000,), 64))
    twice[1] = twice[0]
    beyond = unpack_indices(good.indices, kept((5000,), 64))
    beyond[-1] = 4095
    for bad in (
        Sparse(pack_indices(twice), good.codes, good.table),
        Sparse(pack_indices(beyond), good.codes, good.table),
        Sparse(good.indices, good.codes, good.table * torch.nan),
        Sparse(good.indices.int(), good.codes, good.table),
        Sparse(good.indices, good.codes, good.table.double()),
    ):
        assert not bad.fits((5000,), 64)


def test_zeros_and_large_norms():
    zeros = compress(torch.zeros(128, 64), 64)
    assert zeros.fits((128, 64), 64) and not decompress(zeros, (128, 64), 64, torch.float32).any()
    deltas = [torch.full((4,), value) for value in (1.0, 2.0, 100.0)]
    assert [float(each[0]) for each in clipped_to_median(deltas, [2.0, 4.0, 200.0])] == [1.0, 2.0, 2.0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_norm_is_that_of_the_sent_tensor(shape):
    sparse = compress(accumulate(torch.zeros(shape), drawn(shape), 0.95), 64)
    sent = decompress(sparse, shape, 64, torch.float64)
    assert norm_of(sparse, shape, 64) == pytest.approx(float(sent.norm()), rel=1e-13)
