"""Products that overlap with messages of tensor parallel ranks equal one rank's, with the same account.

`symmetric`: as on GPUs, with what torch itself computes in place of its kernels where tensors have no values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric_memory

from megatron.config import resolve
from megatron.config.resolution import combine
from megatron.config.source.layers import ConfigSource
from megatron.config.variants import overlay
from megatron.parallel.layers import async_tensor
from megatron.parallel.layers.async_tensor import check_async_tensor
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Axis, Mesh
from megatron.parallel.messages.account import Recorder
from tests.model.parity import check_part
from tests.parallel.test_tensor_parallel import MODELS, step, whole
from tests.plan.test_search import LLAMA, question
from tests.selection import toured
from tests.training.layouts.layout_check import compare
from tests.training.matrix import Case, cases, merged
from tests.workers import run

ASYNC = {"parallel": {"async_tensor": True}}
OPERATIONS = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")


@contextmanager
def symmetric(wanted: bool) -> Iterator[list[str]]:
    """Calls of torch's operations on symmetric memory, while they stand for a GPU's."""
    called: list[str] = []
    if not wanted:
        yield called
        return

    def standing_in(name: str) -> Callable[..., Any]:
        plain = getattr(symmetric_memory, f"_{name}_fallback")

        def compute(*args: Any, **options: Any) -> Any:
            called.append(name)
            return plain(*args, **options)

        return compute

    library = torch.library.Library("symm_mem", "IMPL")
    for name in OPERATIONS:
        library.impl(name, standing_in(name), "CPU")
    plain, async_tensor._symmetric = async_tensor._symmetric, lambda x: True
    try:
        yield called
    finally:
        async_tensor._symmetric = plain
        library._destroy()


def observed(values: dict, layout: Layout, on_gpu: bool):
    """(what `step` gives, operations called, the account's messages and bytes by group and operation)."""
    recorder = Recorder(Mesh.build(layout))
    with symmetric(on_gpu) as called:
        recorder.install()
        try:
            found = step(values, layout, "none")
        finally:
            recorder.remove()
    return found, called, recorder.tally.by("group", "operation", "dtype")


@pytest.mark.parametrize("ranks, on_gpu", toured([(2, True), (2, False), (4, False), (4, True)], "layouts"))
def test_equals_one_rank(ranks: int, on_gpu: bool):
    layout = Layout(tensor=ranks, sequence=True, async_tensor=True)
    for name, values in MODELS.items():
        answers = run(ranks, observed, values, layout, on_gpu)
        for rank, (own, called, _) in enumerate(answers):
            assert set(called) == (set(OPERATIONS) if on_gpu else set())
            check_part(own, whole(name), (name, rank))


@pytest.mark.parametrize("name", toured(MODELS, "layouts"))
def test_the_account_is_that_of_gathers_and_scatters(name: str):
    plain = Layout(tensor=2, sequence=True)
    overlapping = Layout(tensor=2, sequence=True, async_tensor=True)
    wanted = run(2, observed, MODELS[name], plain, False)
    assert all(account for _, _, account in wanted)
    for on_gpu in (False, True):
        found = run(2, observed, MODELS[name], overlapping, on_gpu)
        assert [account for _, _, account in found] == [account for _, _, account in wanted]


def test_one_rank_is_warned():
    made = combine([ConfigSource(overlay(LLAMA, ASYNC))], ranks=1)
    assert any(each.key == "parallel.async_tensor" and "no effect" in each.rule for each in made.warnings)
    assert not Layout.of(made.config, 1).async_tensor


def test_plans_propose_what_may_start():
    values = overlay(LLAMA, ASYNC)
    choices = [each.choice for each in question(values, 4).answers().plans]
    assert {each.tensor for each in choices} == {1, 2, 4}
    for choice in choices:
        config = resolve(overlay(values, choice.values()), ranks=4)
        assert Layout.of(config, 4).async_tensor == (choice.tensor > 1)
        assert choice.recompute == "none"


def trained() -> Case:
    known = {each.name: each for each in cases()}
    usual = known["fp32: llama on tp2 · dp2, ZeRO 2, sequence parallel"]
    return replace(usual, values=merged(usual.values, ASYNC))


def test_a_run_equals_one_process():
    compare(trained())


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The second of four ranks on a host with four NVIDIA GPUs that read each other's memory."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    monkeypatch.setattr(torch.version, "hip", None)
    for name, value in {"is_available": True, "current_device": 1, "device_count": 4}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: True)
    return monkeypatch


def test_gpus_of_one_host_that_read_each_other_may(gpus: pytest.MonkeyPatch):
    check_async_tensor(Axis(1, 4), "cuda")
    check_async_tensor(Axis(0, 2), "cuda")


def test_what_a_gpu_or_torch_cannot_is_refused(gpus: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="the 4 tensor parallel ranks on one host"):
        check_async_tensor(Axis(0, 4), "cuda")
    with pytest.raises(ValueError, match="the 2 tensor parallel ranks on one host"):
        check_async_tensor(Axis(2, 2), "cuda")  # its first rank is on the host before
    gpus.setattr(torch.cuda, "can_device_access_peer", lambda own, other: other != 3)
    check_async_tensor(Axis(1, 2), "cuda")
    with pytest.raises(ValueError, match="unlike 1 and 3"):
        check_async_tensor(Axis(1, 4), "cuda")
    gpus.setattr(torch, "__version__", "2.11.0+cu130")
    with pytest.raises(ValueError, match=r"torch 2.13 or later, unlike 2.11.0"):
        check_async_tensor(Axis(1, 4), "cuda")
    gpus.setattr(torch.version, "hip", "7.0")
    with pytest.raises(ValueError, match="must have NVIDIA GPUs"):
        check_async_tensor(Axis(1, 4), "cuda")
