"""AdamW's passes over large flat tensors on a GPU, as kernels that Triton compiles at their first call."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.parallel.layout.precision import to_device

BLOCK = 4096  # elements of a program
ALIGNED = 16  # elements, and bytes of addresses
MOST = 32  # gradients of one kernel
LEAST = 1e-300  # stands for a beta of 0, which has no logarithm


@triton.jit
def _add(  # type: ignore[no-untyped-def]
    gradients, numbers, about, squares, ALIGNED: tl.constexpr, ABOUT: tl.constexpr, BLOCK: tl.constexpr
):
    number = tl.load(numbers + tl.program_id(0))
    gradient = gradients[0]
    for other in tl.static_range(1, len(gradients)):
        if number == other:
            gradient = gradients[other]
    row = about + number * ABOUT
    program, size = tl.program_id(0) - tl.load(row), tl.load(row + 1)
    total = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    if ALIGNED:  # then several elements are loaded at once
        gradient, total, size = tl.multiple_of(gradient, 16), tl.multiple_of(total, 16), tl.multiple_of(size, 16)
    places = program * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    sums = tl.load(gradient + places, inside, 0.0).to(tl.float32)
    sums += tl.load(total + places, inside & (tl.load(row + 4) == 0), 0.0)
    tl.store(total + places, sums, inside)
    place = tl.load(row + 3)
    if place >= 0:
        tl.store(squares + place + program, tl.sum(sums * sums, 0))


@triton.jit
def _update(  # type: ignore[no-untyped-def]
    master, average, square, gradient, narrow, step, bad, scale, lr, decay, size,
    BETA1: tl.constexpr, BETA2: tl.constexpr, LOG1: tl.constexpr, LOG2: tl.constexpr, EPSILON: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(bad) == 0.0:
        places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = places < size
        updates = tl.load(step).to(tl.float64)  # in fp64, since 1 - 0.999 ** 1 has few digits in fp32
        first = (1.0 - tl.exp(updates * LOG1)).to(tl.float32)
        second = tl.sqrt(1.0 - tl.exp(updates * LOG2)).to(tl.float32)
        g = tl.load(gradient + places, inside, 0.0) / tl.load(scale)
        m = BETA1 * tl.load(average + places, inside, 0.0) + (1.0 - BETA1) * g
        v = BETA2 * tl.load(square + places, inside, 0.0) + (1.0 - BETA2) * g * g
        w = tl.load(master + places, inside, 0.0)
        w -= lr * (decay * w + m / first / (tl.sqrt(v) / second + EPSILON))  # 1 - lr * decay would round the decay
        tl.store(average + places, m, inside)
        tl.store(square + places, v, inside)
        tl.store(master + places, w, inside)
        tl.store(narrow + places, w.to(narrow.dtype.element_ty), inside)


def programs(size: int) -> int:
    """Programs of a kernel for `size` elements, and sums of squares that `add` gives."""
    return -(-size // BLOCK)


@dataclass(frozen=True, eq=False)
class Sums:
    """Numbers on the device about up to `MOST` sums that one kernel adds to.

    Attributes:
        of_programs: int64 [programs], the sum that each program adds to.
        about: int64 [sums, 5], of each sum its first program, its size, its address, the place of its squares, which is
            negative without any, and whether it begins.
        aligned: whether sizes and addresses are multiples of 16.
    """

    of_programs: Tensor
    about: Tensor
    aligned: bool

    @staticmethod
    def of(totals: Sequence[Tensor], places: Sequence[int], begin: Sequence[bool]) -> Sums:
        """Of contiguous fp32 tensors, all different.

        Args:
            places: of the first sum of squares of each. -1 without squares.
            begin: whether each begins with its gradient.
        """
        counts, device = [programs(each.numel()) for each in totals], totals[0].device
        first = [sum(counts[:number]) for number in range(len(counts))]
        rows = [
            (at, each.numel(), each.data_ptr(), place, new)
            for at, each, place, new in zip(first, totals, places, begin)
        ]
        aligned = all(number % ALIGNED == 0 for _, *numbers, _, _ in rows for number in numbers)
        numbers = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        return Sums(to_device(numbers, device), to_device(torch.tensor(rows), device), aligned)


def add(sums: Sums, gradients: Sequence[Tensor], squares: Tensor) -> None:
    """Add gradients to their sums, or begin the sums with them.

    Args:
        gradients: contiguous, of one type.
        squares: fp32. At a sum's place it gets `programs(size)` sums of squares of the new sum.
    """
    aligned = sums.aligned and all(each.data_ptr() % ALIGNED == 0 for each in gradients)
    filled = (*gradients, *[gradients[0]] * (MOST - len(gradients)))  # so that one kernel fits all numbers of them
    _add[(len(sums.of_programs),)](
        filled,
        sums.of_programs,
        sums.about,
        squares,
        ALIGNED=aligned,
        ABOUT=sums.about.shape[1],
        BLOCK=BLOCK,
        num_warps=8,
    )


def update(
    group: dict[str, Any], master: Tensor, narrow: Tensor, states: dict[str, Tensor], bad: Tensor, scale: Tensor
) -> None:
    """One update of torch's AdamW, which also writes the weights in the type of the forward pass.

    Args:
        group: settings as torch has them.
        master: [n] fp32, with its gradient.
        narrow: [n] the weights that it is copied to.
        states: as torch's, on the device. `step` counts this update already.
        bad: fp32 0-d, 0 if the update is to be done.
        scale: fp32 0-d, divides the gradient.
    """
    betas, gradient, size = group["betas"], master.grad, master.numel()
    assert gradient is not None
    logs = [math.log(max(beta, LEAST)) for beta in betas]
    flats = (master, states["exp_avg"], states["exp_avg_sq"], gradient, narrow)
    whole = size // ALIGNED * ALIGNED  # a kernel for multiples of 16 loads several elements at once
    for begin, end in ((0, whole), (whole, size)):
        if begin < end:
            _update[(programs(end - begin),)](
                *(each[begin:end] for each in flats), states["step"], bad, scale, group["lr"], group["weight_decay"],
                end - begin, BETA1=betas[0], BETA2=betas[1], LOG1=logs[0], LOG2=logs[1], EPSILON=group["eps"],
                BLOCK=BLOCK, num_warps=8,
            )  # fmt: skip


def try_them(device: torch.device, dtypes: Iterable[torch.dtype]) -> None:
    """Compile and run the kernels, on numbers that nothing reads. Raises what Triton raises.

    Args:
        dtypes: of parameters. Triton compiles kernels for each.
    """
    size = 2 * ALIGNED + 3  # reaches both kernels of an update
    many = {name: torch.zeros(size, device=device) for name in ("exp_avg", "exp_avg_sq")}
    one, master = torch.ones((), device=device), torch.zeros(size, device=device)
    master.grad = torch.zeros(size, device=device)
    group = {"betas": (0.9, 0.999), "eps": 1e-8, "lr": 0.0, "weight_decay": 0.0}
    for narrow in (torch.zeros(size, dtype=each, device=device) for each in dtypes):
        for total in (master.grad, master.grad[:ALIGNED]):
            add(Sums.of([total], [0], [True]), [narrow[: len(total)]], torch.zeros(1, device=device))
        update(group, master, narrow, {**many, "step": one}, 1 - one, one)
