"""Sums in fewer bytes: how far off they may be, that nothing is lost for good, and what is sent."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron.config.wire import BLOCK, FEEDS_BACK, SHARE, WIRES, part_bytes, part_elements
from megatron.parallel.account import Recorder
from megatron.parallel.compression import CompressedSum, decode, encode, sum_messages
from megatron.parallel.layout import Layout
from megatron.parallel.mesh import Mesh
from tests.workers import run

FORMS = [wire for wire in WIRES if wire != "none"]
RANKS, TURNS = 4, 5
SIZES = (1, 1000, 5000)
HALF = {"bf16": 2.0**-8, "fp16": 2.0**-11}  # unit roundoff: 8 and 11 significant bits


def values(size: int, turn: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * turn + 10 * rank + size)
    return torch.randn(size, generator=generator) * torch.logspace(-3, 1, size)


def coded(wire: str, parts: torch.Tensor) -> torch.Tensor:
    return decode(wire, encode(wire, parts), parts.shape[1])


@pytest.mark.parametrize("wire", FORMS)
def test_what_is_kept_of_a_value(wire):
    x = values(4 * 2 * BLOCK, 0, 0).view(4, 2 * BLOCK)
    assert encode(wire, x).shape == (4, part_bytes(wire, 2 * BLOCK))
    found, error = coded(wire, x), (coded(wire, x) - x).abs()
    if wire in HALF:
        assert (error <= HALF[wire] * x.abs() + 2.0**-25).all(), "half a last digit; fp16 has none below 2^-24"
    elif wire == "int8_block":
        largest = x.view(-1, BLOCK).abs().amax(-1, keepdim=True)
        assert (error.view(-1, BLOCK) <= largest / 254 * (1 + 1e-5)).all(), "half a step of 127 in the block"
    else:
        kept = found != 0
        assert (kept.sum(1) == 2 * BLOCK // SHARE).all() and torch.equal(found[kept], x[kept])
        for row, mask in zip(x.abs(), kept):
            assert row[mask].min() >= row[~mask].max()
    assert torch.equal(coded(wire, torch.zeros(1, BLOCK)), torch.zeros(1, BLOCK))


def test_what_is_no_number_is_seen_and_not_kept():
    for wire in FORMS:
        for bad in (float("inf"), float("nan")):
            x = torch.ones(1, BLOCK)
            x[0, 3] = bad
            assert not coded(wire, x).isfinite().all(), wire


def four_ranks() -> dict:
    mesh = Mesh.build(Layout(data=RANKS), None)
    recorder, told = Recorder(mesh), {}
    recorder.install()
    for wire in FORMS:
        sums = CompressedSum(wire)
        for turn in range(TURNS):
            sums.begin()
            told[wire, turn] = [sums.sum(values(size, turn, mesh.rank), mesh.data.group) for size in SIZES]
        told[wire, "sent"] = recorder.tally.take().by("operation", "dtype")
        told[wire, "left"] = list(sums.left_out.values())
    broken = CompressedSum("int8_block")
    bad = values(1000, 0, mesh.rank)
    bad[7] = float("inf")
    told["overflow"] = bool(broken.sum(bad, mesh.data.group).isfinite().all())
    broken.begin()
    told["after"] = bool(broken.sum(values(1000, 1, mesh.rank), mesh.data.group).isfinite().all())
    recorder.remove()
    assert dist.is_initialized()
    return told


@pytest.fixture(scope="module")
def told() -> list[dict]:
    return run(RANKS, four_ranks)


def exact(size: int, turn: int) -> torch.Tensor:
    return sum(values(size, turn, rank).double() for rank in range(RANKS))


def test_sums_are_the_same_on_all_ranks_and_near(told):
    """Off by what each rank's rounding and that of the sum allow; top_k leaves out by design (next test)."""
    for wire in FORMS:
        for at, size in enumerate(SIZES):
            first = told[0][wire, 0][at]
            assert all(torch.equal(each[wire, 0][at], first) for each in told), wire
            magnitudes = sum(values(size, 0, rank).abs().double() for rank in range(RANKS))
            error = (first.double() - exact(size, 0)).abs()
            if wire in HALF:
                # each term is rounded, and then their sum, which is at most the terms' magnitudes
                assert (error <= 2.01 * HALF[wire] * magnitudes + 5 * 2.0**-25).all(), wire
            elif wire == "int8_block":
                assert error.max() <= 2.02 * magnitudes.max() / 254


def test_what_was_left_out_comes_later(told):
    """Over all turns, what was given is what came out and what is still left: to the rounding of fp32."""
    for wire in FEEDS_BACK:
        for at, size in enumerate(SIZES):
            given = sum(exact(size, turn) for turn in range(TURNS))
            came = sum(told[0][wire, turn][at].double() for turn in range(TURNS))
            left = sum(each[wire, "left"][at][0].double() for each in told).view(-1)
            left += torch.cat([each[wire, "left"][at][1].double().view(-1) for each in told])
            scale = sum(values(size, turn, rank).abs().max() for turn in range(TURNS) for rank in range(RANKS))
            assert (came + left[:size] - given).abs().max() <= 1e-6 * scale, (wire, size)
            if size > 1:
                assert left.abs().max() > 0


def test_bytes(told):
    """As the formula of predictions says; and in numbers for 5,000 elements of int8."""
    for wire in FORMS:
        sizes = [sum_messages(wire, size, RANKS) for size in SIZES]
        for each in told:
            assert each[wire, "sent"] == {
                ("all_to_all", "uint8"): (TURNS * 3, TURNS * sum(first for first, _ in sizes)),
                ("all_gather", "uint8"): (TURNS * 3, TURNS * sum(second for _, second in sizes)),
            }
    assert part_elements("int8_block", 5000, 4) == 1280 and sum_messages("int8_block", 5000, 4)[0] == 4 * (1280 + 20)
    assert sum_messages("bf16", 5000, 4) == (10000, 10000) and sum_messages("top_k", 5000, 4)[0] == 4 * 8 * 40


def test_an_overflow_is_seen_and_forgotten(told):
    assert all(not each["overflow"] and each["after"] for each in told)
