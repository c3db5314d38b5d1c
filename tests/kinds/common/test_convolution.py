"""The short causal convolution: every tap by hand, in float64, and its gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.kinds.common.recurrence.convolution import causal_convolution, last_taps
from tests.float64 import DOUBLE, EXACT
from tests.model.parity import relative

B, S, C = 2, 9, 6


def by_hand(x, weight, bias, past, starts):
    """Token by token, tap by tap."""
    taps = weight.shape[-1]
    rows = []
    for sample in range(B):
        for place in range(S):
            total = torch.zeros(C, dtype=x.dtype) if bias is None else bias
            for tap in range(taps):
                source = place - (taps - 1 - tap)
                if starts is not None and source < starts[sample, place]:
                    continue
                if source >= 0:
                    total = total + weight[:, 0, tap] * x[sample, source]
                elif past is not None:
                    total = total + weight[:, 0, tap] * past[sample, taps - 1 + source]
            rows.append(F.silu(total))
    return torch.stack(rows).view(B, S, C)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("with_bias, with_past", [(True, True), (False, True), (True, False), (False, False)])
@pytest.mark.parametrize("taps", [2, 4])
def test_values_and_gradients(taps, with_bias, with_past, documents):
    generator = torch.Generator().manual_seed(taps)
    shapes = {"x": (B, S, C), "weight": (C, 1, taps), "bias": (C,), "past": (B, taps - 1, C)}
    given = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    given = {name: each.to(DOUBLE).requires_grad_() for name, each in given.items()}
    if not with_bias:
        del given["bias"]
    if not with_past:
        del given["past"]
    starts = None
    if documents:  # the first document of the first sample began before this piece
        begun = -5 if with_past else 0
        starts = torch.tensor([[begun] * 4 + [4] * 5, [0] * 1 + [1] * 2 + [3] * 6])
    double = {name: each.detach().clone().requires_grad_() for name, each in given.items()}
    wanted = by_hand(double["x"], double["weight"], double.get("bias"), double.get("past"), starts)
    found = causal_convolution(given["x"], given["weight"], given.get("bias"), given.get("past"), starts)
    assert relative(found, wanted) < EXACT
    upstream = torch.randn(B, S, C, generator=generator).to(DOUBLE)
    gradients = torch.autograd.grad(found, list(given.values()), upstream)
    for name, gradient, expected in zip(given, gradients, torch.autograd.grad(wanted, list(double.values()), upstream)):
        assert relative(gradient, expected) < EXACT, name


def test_in_bf16_sums_are_wide():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 256, C, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(C, 1, 4, generator=generator).bfloat16().requires_grad_()
    double = [each.detach().double().requires_grad_() for each in (x, weight)]
    for inputs in ((x, weight), double):
        causal_convolution(*inputs, None).sum().backward()
    assert relative(weight.grad.double(), double[1].grad) < 1e-2
    assert relative(x.grad.double(), double[0].grad) < 2e-2


def test_what_is_handed_over_continues_the_sequence():
    generator = torch.Generator().manual_seed(5)
    x, weight = (torch.randn(shape, generator=generator).to(DOUBLE) for shape in ((B, S, C), (C, 1, 4)))
    whole = causal_convolution(x, weight, None)
    first, second = x[:, :4], x[:, 4:]
    continued = causal_convolution(second, weight, None, last_taps(first, None, 4))
    assert relative(torch.cat([causal_convolution(first, weight, None), continued], 1), whole) < EXACT
