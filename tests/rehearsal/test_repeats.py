"""Calls of scans that are alike are run once, and counted as if all were run."""

from __future__ import annotations

import functools
from multiprocessing import get_context

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.config import resolve
from megatron.kinds.common.recurrence import recomputed as place
from megatron.kinds.common.recurrence.recomputed import recomputed
from megatron.rehearsal.command import PRELOADED
from megatron.rehearsal.rank import RankCounts, rehearse_rank
from megatron.rehearsal.repeats import Repeats
from megatron.rehearsal.storage_counter import ProgramPlace, StorageCounter
from tests.training.matrix import cases

CASES = {case.name: case for case in cases()}
OFTEN = "fp32: rwkv7 on one, ZeRO 3, recomputation"
RARELY = (
    "fp32: state space on one, ZeRO 0",
    "fp32: rwkv7 on one, ZeRO 0, chunks",
    "fp32: gated delta on tp2, sequence parallel, selective recomputation",
    "fp32: rwkv4 on pp2",
    "fp32: rwkv5 on tp2, sequence parallel",
    "fp32: rwkv6 on dp2, ZeRO 3, one micro-batch",
    "fp32: zamba2 on tp2, ZeRO 0, recomputation",
    "fp32: jamba on pp2, ZeRO 0",
)


def in_a_process(name: str, repeats: bool) -> RankCounts:
    case, context = CASES[name], get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with context.Pool(1) as pool:
        return pool.apply(rehearse_rank, (resolve(case.values, ranks=case.ranks), case.ranks, 0, None, repeats))


@pytest.mark.parametrize("name", [OFTEN, *(pytest.param(name, marks=pytest.mark.slow) for name in RARELY)])
def test_a_rehearsal_counts_the_same(name):
    """To the byte, the operation and the moment: nothing is estimated."""
    often, once = (in_a_process(name, repeats) for repeats in (False, True))
    for each in (often, once):
        each.allocations = sorted((own.size, str(own.place), own.part) for own in each.allocations)  # type: ignore[misc]
        each.host, each.processor = 0, 0.0
    assert once == often


def loop(x: Tensor, state: Tensor, steps: int = 3) -> tuple[Tensor, Tensor]:
    for _ in range(steps):
        state = state + (x * 2).sum(0)
    return (x @ x.mT) + state.sum(), state


def counts(ledger: StorageCounter) -> tuple:
    return ledger.live, ledger.peak, ledger.operations, ledger.flops, sorted(each.size for each in ledger.at_peak())


@pytest.mark.parametrize("function", [loop, functools.partial(loop, steps=7)])
def test_a_function_is_run_once_for_tensors_of_a_form(function):
    ran = []
    here = ProgramPlace("forward", "layers.0.mamba")

    def train(repeat: bool) -> tuple:
        with FakeTensorMode(), StorageCounter(lambda: here) as ledger:
            repeats = Repeats(ledger)
            with repeats.installed() if repeat else torch.enable_grad():
                for rows in (5, 5, 5, 8):
                    x, state = torch.ones(rows, 4, requires_grad=True), torch.ones(4, requires_grad=True)
                    y, after = recomputed(function, x, state)
                    (y.sum() + after.sum()).backward()
                    assert x.grad.shape == x.shape and after.shape == (4,) and y.stride() == (rows, 1)
                    del x, state, y, after
            ran.append(len(repeats.notes))
            return counts(ledger)

    assert train(True) == train(False)
    assert ran == [4, 0]  # of two sizes, forward and backward
    assert place.call(max, 1, 2) == 2  # as before


def test_what_may_differ_is_run_each_time():
    """A function that closes over something, and results that are in a tensor from elsewhere."""
    elsewhere = {}
    seen = []

    def given(x: Tensor) -> Tensor:
        seen.append(len(x))
        return elsewhere["x"][:2]

    with FakeTensorMode(), StorageCounter(lambda: ProgramPlace("forward", "")) as ledger:
        repeats = Repeats(ledger)
        elsewhere["x"] = torch.ones(3)
        for _ in range(2):
            repeats.call(given, torch.ones(1))
        assert len(seen) == 2 and not repeats.notes
        for _ in range(2):
            assert repeats.call(split, torch.ones(6))[1].storage_offset() == 2
        assert list(repeats.notes.values()) != [None]
        assert ledger.live == 12


def split(x: Tensor) -> tuple[Tensor, ...]:
    """Views of its input."""
    return x[:2], x[2:]
