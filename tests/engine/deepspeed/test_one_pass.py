"""AdamW's two passes over memory. The engine's side runs on CPUs with torch's functions as kernels.

`make gpu-host` runs the kernels by Triton's interpreter and compiles them for GPUs of NVIDIA and AMD.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.config.arithmetic.machine import installed
from megatron.engine import base as engines
from megatron.engine.deepspeed import one_pass, scattered, step_on_device
from megatron.testing.ranks import on_ranks
from tests.engine.deepspeed.test_sums import train


def add(sums: list[tuple[Tensor, int, bool]], gradients: Sequence[Tensor], squares: Tensor) -> None:
    for (total, at, first), gradient in zip(sums, gradients, strict=True):
        place = total.view(gradient.shape)
        place.copy_(gradient) if first else place.add_(gradient)
        if at >= 0:
            squares[at : at + 2].fill_(total.square().sum() / 2)


def update(group: dict[str, Any], master: Tensor, narrow: Tensor, states: dict[str, Tensor], bad: Any, scale: Any):
    assert master.grad is not None
    torch._fused_adamw_(
        [master], [master.grad], *([states[name]] for name in ("exp_avg", "exp_avg_sq")), [], [states["step"]],
        lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1], weight_decay=group["weight_decay"],
        eps=group["eps"], amsgrad=False, maximize=False, grad_scale=scale, found_inf=bad,
    )  # fmt: skip
    narrow.copy_(master)


def sums_of(*columns: Sequence[Any]) -> list[tuple[Any, ...]]:
    assert 0 < len(columns[0]) <= IN_TORCH.MOST
    return list(zip(*columns, strict=True))


SUMS = SimpleNamespace(of=sums_of)
IN_TORCH = SimpleNamespace(add=add, update=update, programs=lambda size: 2, Sums=SUMS, MOST=5)


def both_ways(ranks: int, **more: Any) -> list[str]:
    """Names of what differs in any bit. Nothing is clipped, since the norm is added up in another order."""
    with mock.patch.object(step_on_device, "on_gpu", lambda optimizer: True):
        with mock.patch.object(engines, "passes_of_adamw", lambda *_: None):  # the interpreter would run the kernels
            wanted = train(ranks, limit=1e3, **more)
        with mock.patch.object(engines, "passes_of_adamw", lambda *_: IN_TORCH):
            found = train(ranks, limit=1e3, **more)
    assert found.keys() == wanted.keys()
    return [name for name, values in found.items() if not values.equal(wanted[name])]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_engine_makes_the_same_bits_in_two_passes(ranks: int):
    assert on_ranks(ranks, both_ways, ranks) == [[]] * ranks


def after_the_pass() -> list[str]:
    return both_ways(1, deepspeed={"bf16": {"enabled": True, "immediate_grad_update": False}})


def test_gradients_that_deepspeed_adds_after_the_backward_pass():
    assert on_ranks(1, after_the_pass) == [[]]


def few_and_single(stage: int, compute: str, reduce: str) -> tuple[list[str], int]:
    """Names of what differs in any bit between sums in few of torch's kernels and single ones, and calls of those."""
    calls = [0]

    def counted(into: Callable[..., None]) -> Callable[..., None]:
        def call(*tensors: Sequence[Tensor]) -> None:
            calls[0] += len(tensors[0]) > 1
            into(*tensors)

        return call

    with mock.patch.object(scattered, "on_gpu", lambda optimizer: False):
        wanted = train(2, 1e3, stage, compute, reduce)
    several = {name: counted(getattr(torch, name)) for name in ("_foreach_copy_", "_foreach_add_")}
    with mock.patch.object(scattered, "on_gpu", lambda optimizer: True), mock.patch.multiple(torch, **several):
        found = train(2, 1e3, stage, compute, reduce)
    assert found.keys() == wanted.keys()
    return [name for name, values in found.items() if not values.equal(wanted[name])], calls[0]


@pytest.mark.parametrize(
    ("stage", "compute", "reduce"), [(1, "fp32", "fp32"), (2, "fp32", "fp32"), (2, "bf16", "fp32"), (2, "bf16", "bf16")]
)
def test_other_sums_take_few_kernels_of_torch(stage: int, compute: str, reduce: str):
    for different, calls in on_ranks(2, few_and_single, stage, compute, reduce):
        assert not different and calls > 4


def head_only(stage: int, compute: str) -> list[str]:
    """Names of what differs in any bit between sums in few kernels and single ones, with one gradient in a pass."""
    found = []
    for few in (False, True):
        with mock.patch.object(scattered, "on_gpu", lambda optimizer, few=few: few):
            found.append(train(2, 1e3, stage, compute, head_only=True))
    return [name for name, values in found[0].items() if not values.equal(found[1][name])]


@pytest.mark.parametrize(("stage", "compute"), [(1, "fp32"), (1, "bf16"), (2, "fp32"), (2, "bf16")])
def test_a_gradient_that_is_the_last_of_a_pass_and_the_first_of_the_next(stage: int, compute: str):
    assert on_ranks(2, head_only, stage, compute) == [[], []]


needs_triton = pytest.mark.skipif(not installed("triton"), reason="needs triton")


interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET=1 chooses the interpreter"
)


@needs_triton
def test_kernels_are_tried_with_all_types_of_parameters():
    """Some layers keep parameters in fp32. A kernel that fails for these must fail before the first step."""
    from megatron.engine.deepspeed import adamw_kernels as kernels

    added, updated = set(), set()
    wide, short = torch.zeros(16), torch.zeros(16, dtype=torch.bfloat16)
    optimizer = SimpleNamespace(fp32_groups_flat_partition=[wide, wide], bf16_groups_flat=[short, wide])
    with (
        mock.patch.object(one_pass, "skips_on_device", lambda inner: True),
        mock.patch.object(one_pass, "is_bf16_on_gpu", lambda optimizer: True),
        mock.patch.object(kernels, "add", lambda sums, gradients, squares: added.add(gradients[0].dtype)),
        mock.patch.object(kernels, "update", lambda group, master, narrow, *states: updated.add(narrow.dtype)),
    ):
        assert one_pass.passes_of_adamw(optimizer, SimpleNamespace(kernels=None)) is kernels
    assert added == updated == {torch.bfloat16, torch.float32}


@needs_triton
@interpreted
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.0)])
def test_kernels_against_torch_in_float64(betas: tuple[float, float]):
    """Bounds are a few roundings of fp32: four updates of at most 0.01, and weights below 4."""
    from megatron.engine.deepspeed import adamw_kernels as kernels

    torch.manual_seed(0)
    size = 2 * kernels.BLOCK + 1003  # not a multiple of 16
    group = {"lr": 1e-2, "betas": betas, "eps": 1e-8, "weight_decay": 0.1}
    master = torch.randn(size)
    exact = torch.nn.Parameter(master.double())
    plain = torch.optim.AdamW([exact], **group)  # type: ignore[arg-type]
    total, squares = torch.full((size,), float("nan")), torch.zeros(kernels.programs(size))
    states = {"exp_avg": torch.zeros(size), "exp_avg_sq": torch.zeros(size), "step": torch.zeros(())}
    narrow = torch.zeros(size, dtype=torch.float16)  # the interpreter rounds bf16 in another way
    good, bad, scale = torch.zeros(()), torch.ones(()), torch.tensor(2.5)
    for _ in range(4):
        gradients = torch.randn(2, size).half()
        for first, gradient in zip((True, False), gradients):
            kernels.add(kernels.Sums.of([total], [0], [first]), [gradient], squares)
        summed = gradients.double().sum(0)
        torch.testing.assert_close(squares.double().sum().sqrt(), summed.norm(), rtol=1e-6, atol=0)
        exact.grad, master.grad = summed / 2.5, total
        plain.step()
        states["step"] += 1
        kernels.update(group, master, narrow, states, good, scale)
        torch.testing.assert_close(master.double(), exact.detach(), rtol=4 * 2**-23, atol=4 * 0.01 * 2**-16)
        assert narrow.equal(master.half())
    before = [each.clone() for each in (master, narrow, *states.values())]
    kernels.update(group, master, narrow, states, bad, scale)
    assert all(each.equal(old) for each, old in zip((master, narrow, *states.values()), before))


@needs_triton
@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])  # the interpreter rounds bf16 in another way
@pytest.mark.parametrize("rest", [0, 3])  # elements beyond a multiple of 16
def test_one_kernel_adds_several_gradients_and_begins_some_sums(dtype: torch.dtype, rest: int):
    from megatron.engine.deepspeed import adamw_kernels as kernels

    sizes, places = (kernels.BLOCK + 16, 16 + rest, 2 * kernels.BLOCK, 48, 32), (4, 0, -1, 1, 2)
    totals = list(torch.randn(sum(sizes)).split(sizes))
    begin, squares = (True, False, False, True, False), torch.zeros(6)
    gradients = [torch.randn(size).to(dtype) for size in sizes]
    wanted = [each.float() if new else total + each for each, total, new in zip(gradients, totals, begin)]
    kernels.add(kernels.Sums.of(totals, places, begin), gradients, squares)
    assert all(total.equal(each) for total, each in zip(totals, wanted))
    parts = [*(wanted[n] for n in (1, 3, 4)), torch.zeros(1), wanted[0][: kernels.BLOCK], wanted[0][kernels.BLOCK :]]
    # squares are not negative, so a sum of n of them in any order is off by at most n roundings
    torch.testing.assert_close(
        squares.double(),
        torch.stack([each.double().square().sum() for each in parts]),
        rtol=kernels.BLOCK * 2**-24,
        atol=0,
    )


@needs_triton
@interpreted
def test_a_small_learning_rate_decays_weights_by_its_own_number():
    """Each weight is rounded once. Roundings of many weights nearly cancel out, and one of 1 - lr * decay would not:
    here by 1.5 %."""
    from megatron.engine.deepspeed import adamw_kernels as kernels

    torch.manual_seed(0)
    size, group = 8 * kernels.BLOCK, {"lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    master, zeros = torch.randn(size), torch.zeros(size)
    before, master.grad = master.double(), zeros.clone()
    states = {"exp_avg": zeros.clone(), "exp_avg_sq": zeros.clone(), "step": torch.ones(())}
    kernels.update(group, master, torch.zeros(size).half(), states, torch.zeros(()), torch.ones(()))
    decayed = before.dot(before - master.double()) / before.dot(before)
    assert decayed.item() == pytest.approx(1e-6, rel=4e-3)


def _parts(type: str | tuple[str, ...]) -> list[tuple[int, ...]]:
    """Places of pointers and sizes in an argument."""
    if isinstance(type, tuple):
        return [(n,) for n in range(len(type))]
    return [()] if type[0] in "*i" else []


TARGETS = {"sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}


@needs_triton
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_for_gpus_and_load_vectors(target: str):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron.engine.deepspeed import adamw_kernels as kernels

    numbers = {"BETA1": 0.9, "BETA2": 0.95, "LOG1": -0.1, "LOG2": -0.05, "EPSILON": 1e-8}
    many: dict[str, Any] = {"gradients": ("*bf16",) * kernels.MOST, "numbers": "*i64", "about": "*i64"}
    once: dict[str, Any] = {"size": "i32", "narrow": "*bf16", "lr": "fp32", "decay": "fp32"}
    for kernel, given, options in (
        (kernels._add, many, {"ALIGNED": True, "ABOUT": 5}),
        (kernels._update, once, numbers),
    ):
        constants = {**options, "BLOCK": kernels.BLOCK}
        types = dict.fromkeys(kernel.arg_names, "*fp32") | given | dict.fromkeys(constants, "constexpr")
        places = [(n, *of) for n, type in enumerate(types.values()) for of in _parts(type)]
        source = ASTSource(kernel, types, constexprs=constants, attrs=dict.fromkeys(places, [["tt.divisibility", 16]]))
        made = triton.compile(source, target=GPUTarget(*TARGETS[target]), options={"num_warps": 8})
        text = made.asm["ptx" if target == "sm_90" else "amdgcn"]
        assert made.asm["cubin" if target == "sm_90" else "hsaco"]
        assert "ld.global.v4" in text if target == "sm_90" else "load_dwordx4" in text
