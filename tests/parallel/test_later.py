"""Gradients of weights that are computed later equal autograd's, and their hooks run once per weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.parallel.layers.later import LaterGradients, accumulate
from megatron.parallel.layout.precision import plain


class Product(nn.Module):
    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight, self.bias, self.linear = weight, bias, plain

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x, self.weight, self.bias))


def network() -> nn.Sequential:
    """Two of its products share a weight, and the last one has a weight that is no parameter."""
    draw = torch.Generator().manual_seed(3)

    def made(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(*shape, generator=draw, dtype=torch.float64))

    shared, scaled = made(5, 5), Product(made(5, 5))
    found = nn.Sequential(Product(made(5, 4), made(5)), Product(shared), Product(shared, made(5)), scaled)
    linear = scaled.linear
    scaled.forward = lambda x: linear(x, 2 * scaled.weight, None)  # type: ignore[method-assign]
    return found


def test_gradients_are_autograds():
    expected, found = network(), network()
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    again = x.detach().clone().requires_grad_(True)
    expected(x).square().sum().backward()
    later, ran = LaterGradients(), list[str]()
    later.use_in(found)
    for name, weight in found.named_parameters():
        weight.register_post_accumulate_grad_hook(lambda _, name=name: ran.append(name))
    found(again).square().sum().backward()
    assert torch.equal(again.grad, x.grad)
    waiting = later.take()
    assert len(waiting) == 3 and later.waiting == []
    assert sorted(ran) == ["0.bias", "2.bias", "3.weight"] and found[0].weight.grad is None
    accumulate(waiting)
    assert sorted(ran) == ["0.bias", "0.weight", "1.weight", "2.bias", "3.weight"] and waiting == []
    for (name, theirs), ours in zip(expected.named_parameters(), found.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-13, atol=1e-13, msg=name)


def test_what_has_no_gradient_is_left_alone():
    found, later = network(), LaterGradients()
    later.use_in(found)
    with torch.no_grad():
        found(torch.randn(2, 4, dtype=torch.float64))
    found[0](torch.randn(2, 4, dtype=torch.float64)).sum().backward()  # its input needs no gradient
    assert later.take() == [] and found[0].weight.grad is not None
