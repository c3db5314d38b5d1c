"""Vectors of RWKV that broadcast over tokens, repeated for groups of tokens in compiled parts, next to plain ones in
float64 and bf16."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from megatron.kinds.rwkv import parts
from megatron.kinds.rwkv.rwkv7 import _factors, _finished
from megatron.parallel.layers import over_tokens

B, S, HEADS, H = 2, 24, 2, 8
STARTS = torch.where(torch.arange(S) < 11, 0, 11).expand(B, -1)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def mixes(documents: bool) -> tuple[Callable, list[Tensor]]:
    def mix(x: Tensor, mix_mH: Tensor, last: Tensor) -> tuple[Tensor, ...]:
        return parts.blended(x, mix_mH, last, STARTS if documents else None)

    return mix, [drawn(B, S, H), drawn(6, H), drawn(B, 1, H)]


def factors(first: bool) -> tuple[Callable, list[Tensor]]:
    def make(*given: Tensor) -> tuple[Tensor, ...]:
        inputs: list[Tensor | None] = list(given)
        if first:  # no blend of values
            inputs[5:5] = [None, None]
            inputs[9:9] = [None]
        return _factors(*inputs, heads=HEADS)

    return make, [*(drawn(B, S, H) for _ in range(5 if first else 7)), *(drawn(H) for _ in range(4 if first else 5))]


def finished() -> tuple[Callable, list[Tensor]]:
    heads = [drawn(B, S, HEADS, H // HEADS) for _ in range(4)]
    return partial(_finished, eps=1e-3), [*heads, drawn(B, S, H), *(drawn(H) for _ in range(3))]


CASES = {
    "mixes": partial(mixes, False),
    "mixes of documents": partial(mixes, True),
    "factors": partial(factors, False),
    "factors of the first layer": partial(factors, True),
    "finished": finished,
}


def results(function: Callable, inputs: list[Tensor]) -> list[Tensor]:
    """All results, and the gradients of all inputs."""
    made = function(*inputs)
    made = [made] if isinstance(made, Tensor) else list(made)
    ways = [torch.cos(torch.arange(each.numel(), dtype=each.dtype)).view(each.shape) for each in made]
    return [*made, *torch.autograd.grad(made, inputs, ways)]


@pytest.mark.parametrize("group", [8, 7])
@pytest.mark.parametrize("name", CASES)
def test_groups_of_tokens_have_plain_gradients(name: str, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[str] = []

    def traced(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        graphs.append(graph.code)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr(over_tokens, "GROUP", group)
    torch.manual_seed(0)
    function, inputs = CASES[name]()
    torch._dynamo.reset()
    fast = torch.compile(function, backend=traced, dynamic=False)
    found = results(fast, inputs)
    assert len(graphs) == 1
    assert ("autograd_function_apply" in graphs[0]) == (group == 8)
    for number, (own, wanted) in enumerate(zip(found, results(function, inputs), strict=True)):
        assert own.shape == wanted.shape and own.dtype == wanted.dtype
        assert (own - wanted).norm() <= 1e-14 * wanted.norm(), number

    narrow = [(each.bfloat16() if each.dim() > 2 else each.bfloat16().float()).detach() for each in inputs]
    found, near = (results(each, [x.clone().requires_grad_() for x in narrow]) for each in (fast, function))
    exact = results(function, [each.double().requires_grad_() for each in narrow])
    torch._dynamo.reset()
    for number, (own, plain, wanted) in enumerate(zip(found, near, exact, strict=True)):
        assert own.dtype == plain.dtype
        rounding = (plain - wanted).norm() + (0 if number < len(found) - len(inputs) else 2**-9 * wanted.norm())
        assert (own - wanted).norm() <= rounding, number


def test_gradients_of_groups_are_summed_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between groups too: bf16 would lose 1 of 257."""
    monkeypatch.setattr(over_tokens, "GROUP", 8)
    x, mix = torch.zeros(1, 16, 1), torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    of_mix = torch.zeros_like(x)
    of_mix[0, [0, 1, 8]] = torch.tensor([[256.0], [1.0], [1.0]])
    torch._dynamo.reset()
    made = torch.compile(over_tokens.over_tokens, backend="aot_eager", dynamic=False)([mix], x)
    torch.autograd.backward(made, [of_mix] * 2)
    torch._dynamo.reset()
    assert mix.grad is not None and mix.grad.flatten().tolist() == [258.0] * 2
