"""Kernels of flash-linear-attention behind the adapters, run by Triton's interpreter on CPUs (`make gpu-host`).

Each is compared with torch's path in float64, forward and backward, and must be as near as torch in fp16 is. The
interpreter computes bf16 as integers, so bf16 itself is not run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.config.arithmetic.machine import installed

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET=1 chooses the interpreter"),
    pytest.mark.skipif(not (installed("triton") and installed("fla")), reason="needs triton and fla"),
]
S, HEADS, WIDTH = 70, 2, 16  # more than one chunk of the kernels, and less than two
Kernel = Callable[..., tuple[torch.Tensor, Any]]


class Number(int):
    """A loop's number. Compiled kernels convert it as a tensor, which Python's numbers are not."""

    def to(self, dtype: Any) -> Number:
        return self


def fits_the_interpreter(patch: pytest.MonkeyPatch) -> None:
    """Loops of the kernels that are imported by now count in `Number`."""
    for name, module in list(sys.modules.items()):
        if name.startswith("fla.ops.") and hasattr(module, "tl"):
            patch.setattr(module, "range", lambda *bounds: map(Number, range(*bounds)), raising=False)


@pytest.fixture(scope="module", autouse=True)
def one_configuration():
    """Autotuning would time each configuration on a device."""
    from triton.runtime import autotuner

    made = autotuner.Autotuner.__init__

    def first(self, fn, arg_names, configs, *arguments, **options):
        made(self, fn, arg_names, configs[:1], *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autotuner.Autotuner, "__init__", first)
        yield


def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, dtype=torch.float64)


def mamba2() -> tuple[Kernel, Kernel, list[torch.Tensor]]:
    from megatron.kinds.mamba.ssd import ssd, ssd_of_fla

    x, dt, key, query = (drawn(1, S, HEADS, WIDTH), drawn(1, S, HEADS), *(drawn(1, S, 1, WIDTH) for _ in range(2)))
    per_head = [drawn(HEADS, scale=0.5) for _ in range(3)]
    return ssd_of_fla, ssd, [x, dt, *per_head, key, query]


def gated_delta() -> tuple[Kernel, Kernel, list[torch.Tensor]]:
    from megatron.kinds.gated_delta import delta_rule, kernels

    q, k, v = (drawn(1, S, HEADS, WIDTH) for _ in range(3))
    decay, beta = F.logsigmoid(drawn(1, S, HEADS) + 2), torch.sigmoid(drawn(1, S, HEADS))
    return kernels.gated_delta_rule, delta_rule.gated_delta_rule, [q, k, v, decay, beta]


def rwkv7() -> tuple[Kernel, Kernel, list[torch.Tensor]]:
    from megatron.kinds.rwkv.wkv7 import wkv7
    from megatron.kinds.rwkv.wkv7_kernels import wkv7_of_fla

    r, k, v, erased = (drawn(1, S, HEADS, WIDTH) for _ in range(4))
    erased, rate = F.normalize(erased, dim=-1), torch.sigmoid(drawn(1, S, HEADS, WIDTH))
    log_w = -torch.exp(torch.tensor(-0.5)) * torch.sigmoid(drawn(1, S, HEADS, WIDTH))
    return partial(wkv7_of_fla, dtype=torch.float16), wkv7, [r, log_w, k, v, -erased, erased * rate]


def turned(each: Any) -> Any:
    """With strides that a compiler may give it, which the kernels do not read."""
    if each is None or not each.is_floating_point():
        return each
    return each.transpose(1, -1).contiguous().transpose(1, -1)


class Operations(torch.autograd.Function):
    """The kernels as the two operations of a compiled block."""

    @staticmethod
    def forward(ctx, forward, gradient, *inputs):
        ctx.gradient, ctx.count, made = gradient, len(inputs), forward(*map(turned, inputs))
        y, kept = (made, inputs) if isinstance(made, torch.Tensor) else (made[0], (*inputs[:-1], made[1]))
        ctx.save_for_backward(*kept)
        return y

    @staticmethod
    def backward(ctx, of_y):
        found = ctx.gradient(*map(turned, (of_y, *ctx.saved_tensors)))
        return None, None, *found, *(None for _ in range(ctx.count - len(found)))


def mamba2_operations() -> tuple[Kernel, Kernel, list[torch.Tensor]]:
    from megatron.kinds.mamba import simple_gla, ssd

    _, plain, inputs = mamba2()

    def kernel(x, dt, dt_bias, A_log, D, B, C, *, chunk, starts_BS):
        rows = ssd.gated_rows(x, dt, dt_bias, A_log, B, C, starts_BS, (0.0, None))
        rows = [each.contiguous() for each in rows]
        y = Operations.apply(simple_gla.forward_by_kernels, simple_gla.gradient_by_kernels, *rows)
        return ssd.gated_output(y, x, D), None

    return kernel, plain, inputs


def rwkv7_operations() -> tuple[Kernel, Kernel, list[torch.Tensor]]:
    from megatron.kinds.rwkv.wkv7_kernels import forward_by_kernels, gradient_by_kernels

    _, plain, inputs = rwkv7()

    def kernel(r, log_w, *read, chunk, starts_BS):
        narrow = [each.half() for each in (r, *read)]
        given = narrow[0], log_w, *narrow[1:], starts_BS
        return Operations.apply(forward_by_kernels, gradient_by_kernels, *given), None

    return kernel, plain, inputs


def convolution() -> tuple[Kernel, Kernel, list[torch.Tensor]]:
    from megatron.kinds.common.recurrence.convolution import causal_convolution, of_fla

    def like_a_scan(function: Callable[..., torch.Tensor]) -> Kernel:
        return lambda *inputs, chunk, starts_BS: (function(*inputs, None, starts_BS), None)

    inputs = [drawn(1, S, WIDTH), drawn(WIDTH, 1, 4, scale=0.5), drawn(WIDTH)]
    return like_a_scan(of_fla), like_a_scan(causal_convolution), inputs


KINDS = {
    "convolution": convolution,
    "mamba2": mamba2,
    "mamba2 as operations": mamba2_operations,
    "gated_delta": gated_delta,
    "rwkv7": rwkv7,
    "rwkv7 as operations": rwkv7_operations,
}


def results(kernel: Kernel, inputs: list[torch.Tensor], dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
    """The output and the gradients of all inputs, in float64."""
    leaves = [each.to(dtype).requires_grad_() for each in inputs]
    y = kernel(*leaves, chunk=16, **options)[0]
    ways = torch.cos(torch.arange(y.numel(), dtype=torch.float64)).view(y.shape).to(y.dtype)
    return [each.double() for each in (y.detach(), *torch.autograd.grad((y * ways).sum(), leaves))]


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_kernels_have_the_values_of_torch(name: str, documents: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They keep in 16 bits what torch keeps in 32 between chunks: twice its distance, and as much again. A step of
    fp16 is 2**-11 of a number."""
    import fla.ops.gated_delta_rule
    import fla.ops.rwkv7
    import fla.ops.simple_gla  # noqa: F401

    fits_the_interpreter(monkeypatch)
    torch.manual_seed(0)
    kernel, plain, inputs = KINDS[name]()
    inputs = [each.half().double() for each in inputs]
    starts = torch.where(torch.arange(S) < 23, 0, 23)[None] if documents else None
    wanted = results(plain, inputs, torch.float64, starts_BS=starts)
    given = torch.float32 if name.startswith("rwkv7") else torch.float16  # its adapter rounds, or that of the layer
    near, found = (results(each, inputs, given, starts_BS=starts) for each in (plain, kernel))
    for number, (exact, torchs, own) in enumerate(zip(wanted, near, found, strict=True)):
        spread = (torchs - exact).norm() + 2**-11 * exact.norm()
        assert (own - exact).norm() < 4 * spread, number


def test_documents_of_mamba2_share_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents begin inside a chunk of the kernels, next to each other and with a chunk, and in one of two samples.
    The gradient of a decay is a difference of sums over the chunk, so roundings of later documents remain in it."""
    import fla.ops.simple_gla  # noqa: F401

    fits_the_interpreter(monkeypatch)
    torch.manual_seed(0)
    kernel, plain, own = mamba2()
    other = mamba2()[2]
    inputs = [torch.cat(pair) if pair[0].dim() > 1 else pair[0] for pair in zip(own, other)]
    inputs = [each.half().double() for each in inputs]
    begins = torch.zeros(2, S, dtype=torch.bool)
    begins[0, [23, 25, 26, 64]] = begins[1, 3] = True
    starts = torch.where(begins, torch.arange(S), 0).cummax(-1).values
    wanted = results(plain, inputs, torch.float64, starts_BS=starts)
    near, found = (results(each, inputs, torch.float16, starts_BS=starts) for each in (plain, kernel))
    for number, (exact, torchs, ours) in enumerate(zip(wanted, near, found, strict=True)):
        spread = (torchs - exact).norm() + 2**-11 * exact.norm()
        assert (ours - exact).norm() < 4 * spread, number

    leaves = [each.half().requires_grad_() for each in inputs]
    y = kernel(*leaves, chunk=16, starts_BS=starts)[0]
    x, dt, *_, key, query = torch.autograd.grad(y[0, 26:].float().sum(), leaves)
    for gradient in (x, key, query):
        assert not gradient[0, :26].any() and not gradient[1].any() and gradient[0, 26:].any()
    assert dt[0, :26].abs().max() < 1e-5 * dt[0, 26:].abs().max()
    changed = [each.clone() for each in inputs]
    changed[0][0, :26] *= -2
    with torch.no_grad():
        again = kernel(*(each.half() for each in changed), chunk=16, starts_BS=starts)[0]
    assert torch.equal(again[0, 26:], y[0, 26:]) and not torch.equal(again[0, :26], y[0, :26])
