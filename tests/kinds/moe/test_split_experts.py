"""Gradients of experts' matrices that are computed later equal autograd's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megatron.kinds.moe.experts import Grouped, grouped
from megatron.parallel.layers.later import LaterGradients, accumulate


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_are_autograds(dtype: torch.dtype):
    """The second expert has no rows. In fp32 a sum of seven products is rounded in another order at most."""
    draw, ends = torch.Generator().manual_seed(3), torch.tensor([2, 2, 7], dtype=torch.int32)
    x, weight = (torch.randn(*shape, generator=draw, dtype=dtype) for shape in ((7, 4), (3, 8, 4)))

    def leaves() -> tuple[Tensor, nn.Parameter]:
        return x.clone().requires_grad_(True), nn.Parameter(weight.clone())

    (their_x, theirs), (our_x, ours), later = leaves(), leaves(), LaterGradients()
    grouped(their_x, theirs, ends).square().sum().backward()
    later.multiply(our_x, ours, Grouped(ends)).square().sum().backward()
    assert ours.grad is None
    bound = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(our_x.grad, their_x.grad, rtol=bound, atol=bound)
    accumulate(later.take())
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=bound, atol=8 * bound)
