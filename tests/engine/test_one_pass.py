"""AdamW's two passes over memory. The engine's side runs on CPUs with torch's functions as kernels.

`make gpu-host` runs the kernels by Triton's interpreter and compiles them for GPUs of NVIDIA and AMD.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.config.arithmetic.machine import installed
from megatron.engine import base as engines
from megatron.engine.deepspeed import step_on_device
from megatron.testing.ranks import on_ranks
from tests.engine.test_sums import train


def add(total: Tensor, gradient: Tensor, squares: Tensor, first: bool) -> None:
    place = total.view(gradient.shape)
    place.copy_(gradient) if first else place.add_(gradient)
    squares.fill_(total.square().sum() / len(squares))


def update(group: dict[str, Any], master: Tensor, narrow: Tensor, states: dict[str, Tensor], bad: Any, scale: Any):
    assert master.grad is not None
    torch._fused_adamw_(
        [master], [master.grad], *([states[name]] for name in ("exp_avg", "exp_avg_sq")), [], [states["step"]],
        lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1], weight_decay=group["weight_decay"],
        eps=group["eps"], amsgrad=False, maximize=False, grad_scale=scale, found_inf=bad,
    )  # fmt: skip
    narrow.copy_(master)


IN_TORCH = SimpleNamespace(add=add, update=update, programs=lambda size: 2)


def both_ways(ranks: int) -> list[str]:
    """Names of what differs in any bit. Nothing is clipped, since the norm is added up in another order."""
    with mock.patch.object(step_on_device, "_on_gpu", lambda optimizer: True):
        wanted = train(ranks, limit=1e3)
        with mock.patch.object(engines, "passes_of_adamw", lambda *_: IN_TORCH):
            found = train(ranks, limit=1e3)
    assert found.keys() == wanted.keys()
    return [name for name, values in found.items() if not values.equal(wanted[name])]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_engine_makes_the_same_bits_in_two_passes(ranks: int):
    assert on_ranks(ranks, both_ways, ranks) == [[]] * ranks


needs_triton = pytest.mark.skipif(not installed("triton"), reason="needs triton")


interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET=1 chooses the interpreter"
)


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
            kernels.add(total, gradient, squares, first)
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
    for kernel, options, bf16 in ((kernels._add, {"FIRST": False}, "gradient"), (kernels._update, numbers, "narrow")):
        constants = {**options, "BLOCK": kernels.BLOCK}
        types = dict.fromkeys(kernel.arg_names, "*fp32") | {"size": "i32", bf16: "*bf16"}
        types |= {name: "fp32" for name in ("lr", "decay") if name in types} | dict.fromkeys(constants, "constexpr")
        aligned = {(n,): [["tt.divisibility", 16]] for n, type in enumerate(types.values()) if type[0] in "*i"}
        source = ASTSource(kernel, types, constexprs=constants, attrs=aligned)
        made = triton.compile(source, target=GPUTarget(*TARGETS[target]), options={"num_warps": 8})
        text = made.asm["ptx" if target == "sm_90" else "amdgcn"]
        assert made.asm["cubin" if target == "sm_90" else "hsaco"]
        assert "ld.global.v4" in text if target == "sm_90" else "load_dwordx4" in text
