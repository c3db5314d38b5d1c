"""Models of recurrent layers whose blocks are compiled as a whole, with kernels as operations that torch computes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.config import resolve
from megatron.model.stack import build_model
from megatron.parallel.layers import over_tokens
from megatron.parallel.layout.precision import at_least_fp32

V, S = 61, 24


def result(
    model: dict[str, Any],
    mode: str,
    recompute: str = "none",
    documents: bool = False,
    dtype: torch.dtype = torch.float64,
    change: Callable[[nn.Module], Any] | None = None,
    length: int = S,
    trained: str = "",
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of a small model.

    Args:
        mode: `training.compile`.
        change: of the built model.
        trained: parameters with this in their name. With "none" autograd does not run.
    """
    norm = {"type": "layernorm", "bias": True}
    config = resolve({
        "model": {"hidden_size": 32, "vocab_size": V, "norm": norm, **model},
        "training": {
            "steps": 1,
            "sequence_length": length,
            "compile": mode,
            "activation_checkpointing": {"mode": recompute},
        },
        "data": {"reset_attention_at_eod": documents},
        "tokenizer": {"eod_id": 0},
    })
    built, draws = build_model(config, dtype=dtype), torch.Generator().manual_seed(1)
    for parameter in built.parameters():  # matrices of low rank start at 0
        drawn = 0.1 * torch.randn(parameter.shape, generator=draws, dtype=torch.float64)
        parameter.data = (parameter.data + drawn).bfloat16().to(parameter.dtype)
    if change is not None:
        change(built)
    tokens = torch.randint(V, (2, length + 1), generator=draws)
    numbers = (torch.arange(length) >= torch.tensor([[7], [16]])).long()
    channels = {"documents": numbers, "positions": torch.zeros_like(numbers)} if documents else {}
    for parameter in built.parameters():
        parameter.requires_grad_(trained in parameter.logical.name)
    with torch.set_grad_enabled(trained != "none"):
        loss, _ = built(tokens[:, :-1], tokens[:, 1:], torch.full((2, length), 1 / (2 * length)), **channels)
    if loss.requires_grad:
        loss.backward()
    return loss.detach(), {each.logical.name: each.grad for each in built.parameters() if each.grad is not None}


def on_cpus(operation: Any, gradient: Any, plain: Callable[..., Tensor], results: Callable[..., Any]) -> None:
    """Have torch compute two `operations` on CPUs.

    Args:
        plain: the result, with a gradient of its own, since torch records nothing below an operation.
        results: all results of the first operation. A second one is the last input of `plain`.
    """

    def given(inputs: tuple[Any, ...]) -> list[Tensor]:
        return [each for each in inputs if each is not None and each.is_floating_point()]

    @gradient.register_kernel("cpu")
    def _(of_y: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        numbers = given(inputs)
        leaves = [at_least_fp32(each).detach().requires_grad_() for each in numbers]
        with torch.enable_grad():
            y = plain(*leaves, *inputs[len(numbers) :])
        found = torch.autograd.grad(y, leaves, of_y.to(y.dtype))
        return tuple(each.to(own.dtype).contiguous() for each, own in zip(found, numbers))

    operation.register_kernel("cpu")(results)


def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The code of graphs of compiled blocks, which must have no breaks, for a fixture. Groups have 8 tokens."""
    found: list[str] = []

    def seen(graph: torch.fx.GraphModule, inputs: list) -> torch.fx.GraphModule:
        found.append(graph.code)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile
    monkeypatch.setattr("torch.compile", lambda forward, dynamic, options: compiled(forward, backend=seen))
    monkeypatch.setattr(over_tokens, "GROUP", 8)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # of other tests
    yield found
    torch._dynamo.reset()
    assert not torch._dynamo.utils.counters["graph_break"]


def assert_same(found: tuple[torch.Tensor, dict], wanted: tuple[torch.Tensor, dict]) -> None:
    """In float64."""
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-12, atol=0)
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        assert (found[1][name] - gradient).norm() <= 1e-10 * gradient.norm(), name


def assert_as_near(found: dict, near: dict, exact: dict, rounding: float = 2**-9) -> None:
    """Gradients in bf16 as near as others to those in float64.

    Args:
        rounding: the largest relative error of one, for types other than bf16.
    """
    for name, gradient in exact.items():
        bound = (
            1.25 * (near[name] - gradient).norm() + rounding * gradient.norm()
        )  # sums of another order, one rounding
        assert (found[name] - gradient).norm() <= bound, name
