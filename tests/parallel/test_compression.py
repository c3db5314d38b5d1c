"""Sums in fewer bytes: how far off they may be, that nothing is lost for good, and what is sent."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron.config.arithmetic.wire import (
    BLOCK,
    FEEDS_BACK,
    LEAST_BLOCK,
    SHARE,
    WIRES,
    part_bytes,
    part_elements,
    row_block,
)
from megatron.model.stream import Channel, StreamForm
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from megatron.parallel.messages.account import Recorder
from megatron.parallel.transport.compression import (
    CompressedSum,
    decode,
    encode,
    gathered,
    pack_rows,
    part_message,
    scattered_sum,
    sum_messages,
    summed,
    unpack_rows,
)
from tests.workers import run

ROWS = 8, 75  # of activations on a rank
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
    for wire in FORMS[:-1]:
        x = values(600, 0, mesh.rank).view(ROWS)
        told[wire, "axis"] = [each(x, mesh.data, wire) for each in (summed, gathered, scattered_sum)]
        told[wire, "axis sent"] = recorder.tally.take().by("operation", "dtype")
    broken = CompressedSum("int8_block")
    bad = values(1000, 0, mesh.rank)
    bad[7] = float("inf")
    told["overflow"] = bool(broken.sum(bad, mesh.data.group).isfinite().all())
    broken.begin()
    told["after"] = bool(broken.sum(values(1000, 1, mesh.rank), mesh.data.group).isfinite().all())
    for scale in (1.0, 2.0):  # the loss scaler doubles it between two steps
        rescaled = CompressedSum("top_k", undoable=True)
        rescaled.begin(scale=1.0)
        rescaled.sum(values(1000, 0, mesh.rank), mesh.data.group)
        rescaled.end(True)
        rescaled.begin(scale=scale)
        told["scaled", scale] = rescaled.sum(scale * values(1000, 1, mesh.rank), mesh.data.group) / scale
    recorder.remove()
    assert dist.is_initialized()
    return told


@pytest.fixture(scope="module")
def told() -> list[dict]:
    return run(RANKS, four_ranks)


def exact(size: int, turn: int) -> torch.Tensor:
    return sum(values(size, turn, rank).double() for rank in range(RANKS))


def test_sums_are_the_same_on_all_ranks_and_near(told):
    """Off by the roundings of each rank and of the sum. top_k omits by design (next test)."""
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


def test_what_was_left_out_follows_the_loss_scale(told):
    assert torch.equal(told[0]["scaled", 1.0], told[0]["scaled", 2.0])


def test_bytes(told):
    """As the formula of predictions says, and in numbers for 5,000 elements of int8."""
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


@pytest.mark.parametrize("wire", FORMS[:-1])
def test_activations_on_the_tensor_axis(told, wire):
    """Sums are off by each rank's rounding and the sum's, gathered numbers by one, and scattered ones by the terms'
    roundings. Sums are alike on all ranks, and types and shapes are kept."""
    given = [values(600, 0, rank).view(ROWS).double() for rank in range(RANKS)]
    share = {"int8_block": 1.01 / 254}.get(wire, 1.01 * HALF.get(wire, 0.0))
    largest = sum(each.abs().max() for each in given)
    magnitudes = largest if wire == "int8_block" else sum(each.abs() for each in given)
    whole, tiny = sum(given), 5 * 2.0**-25
    for rank, own in enumerate(told):
        total, everyone, part = own[wire, "axis"]
        assert torch.equal(total, told[0][wire, "axis"][0]) and total.dtype == torch.float32
        assert ((total.double() - whole).abs() <= 2 * share * magnitudes + tiny).all()
        for place, rows in enumerate(everyone.view(RANKS, *ROWS).double()):
            bound = given[place].abs().max() if wire == "int8_block" else given[place].abs()
            assert ((rows - given[place]).abs() <= share * bound + tiny).all()
        rows = slice(2 * rank, 2 * rank + 2)
        bound = largest if wire == "int8_block" else magnitudes[rows]
        assert ((part.double() - whole[rows]).abs() <= share * bound + tiny).all()
        first, second = sum_messages(wire, 600, RANKS)
        assert own[wire, "axis sent"] == {
            ("all_gather", "uint8"): (2, second + part_message(wire, 4 * 600, RANKS)),
            ("all_to_all", "uint8"): (2, first + part_message(wire, 600, RANKS)),
        }


@pytest.mark.parametrize(("hidden", "state", "cut", "block"), [(96, 32, 1, 32), (64, 16, 1, 16), (64, 8, 2, 16)])
def test_blocks_hold_values_of_one_tensor(hidden, state, cut, block):
    """Next to a state a thousand times as large as the hidden state, each is as exact as by itself."""
    form = StreamForm(channels={"state": Channel(state, whole=True)})
    length, samples = 5, 2
    tensors = (
        values(samples * length * hidden, 0, 0).view(samples, length, hidden),
        1000 * values(samples * length * cut * state, 1, 0).view(samples, length * cut, state),
    )
    (joint,) = form.join(tensors)
    width = form.common_width(hidden, cut)
    assert row_block(width) == block >= LEAST_BLOCK
    packed = pack_rows(joint, "int8_block", width)
    found = form.split((unpack_rows(packed, "int8_block", width, torch.float32),), hidden, cut)
    for each, exact in zip(found, tensors, strict=True):
        assert each.shape == exact.shape
        largest = exact.abs().max()
        assert ((each - exact).abs() <= 1.01 / 254 * largest).all() and each.abs().max() > 0


@pytest.mark.parametrize("wire", FORMS[:-1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_between_stages(wire, dtype):
    """The received numbers differ by one rounding, and so does the gradient on the way back. Each is one float tensor
    of the formula's bytes."""
    width, shape = 48, (2, 5, 48)
    x = values(480, 0, 0).view(shape).to(dtype).requires_grad_()
    packed = pack_rows(x, wire, width)
    sent = packed.detach().requires_grad_(packed.is_floating_point())
    y = unpack_rows(sent, wire, width, dtype).view(shape)
    gradient = values(480, 1, 0).view(shape).to(dtype)
    y.backward(gradient)
    packed.backward(sent.grad)
    assert y.dtype == x.grad.dtype == dtype
    assert packed.numel() * packed.element_size() == 2 * part_bytes(wire, 240, row_block(width))
    for found, exact in ((y, x), (x.grad, gradient)):
        blocks = exact.detach().double().view(-1, row_block(width))
        largest = blocks.abs().amax(1, keepdim=True) if wire == "int8_block" else blocks.abs()
        share = {"int8_block": 1 / 254}.get(wire, HALF.get(wire, 0.0))
        again = torch.finfo(dtype).eps / 2 if dtype == torch.bfloat16 else 1e-6  # back to the type it had
        error = (found.detach().double().view_as(blocks) - blocks).abs()
        assert (error <= (share * (1 + 1e-5) + 1.1 * again) * largest + 2.0**-25).all()
