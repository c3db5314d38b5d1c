"""Mamba-2 blocks that are compiled as a whole, with the kernels as operations, next to plain blocks of torch. Torch
computes the operations here."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.kinds.common.recurrence.convolution import causal_convolution
from megatron.kinds.mamba import mamba2, simple_gla
from megatron.parallel.layers import over_tokens
from megatron.parallel.layers.linear import ColumnLinear
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.initial import ZEROS
from megatron.parallel.layout.mesh import Mesh
from megatron.parallel.layout.precision import at_least_fp32
from tests.kinds import whole_blocks
from tests.selection import toured

LAYERS = 2


class Dense(torch.autograd.Function):
    """Linear attention of all tokens at once."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, decay: Tensor) -> Tensor:
        total = decay.double().cumsum(1).transpose(1, 2)
        steps = total.unsqueeze(-1) - total.unsqueeze(-2)  # [B, h, S, S]
        later = torch.ones(steps.shape[-2:], dtype=torch.bool).triu(1)
        decays = steps.masked_fill(later, float("-inf")).exp().to(value.dtype)
        scores = decays * torch.einsum("bthn,bshn->bhts", query, key)
        ctx.save_for_backward(query, key, value, decays, scores)
        return torch.einsum("bhts,bshp->bthp", scores, value)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_y: Tensor) -> tuple[Tensor, ...]:
        query, key, value, decays, scores = ctx.saved_tensors
        of_scores = torch.einsum("bthp,bshp->bhts", of_y, value)
        of_products, of_steps = of_scores * decays, of_scores * scores
        of_total = (of_steps.sum(-1) - of_steps.sum(-2)).transpose(1, 2)
        of_query = torch.einsum("bhts,bshn->bthn", of_products, key)
        of_key = torch.einsum("bhts,bthn->bshn", of_products, query)
        of_value = torch.einsum("bhts,bthp->bshp", scores, of_y)
        return of_query, of_key, of_value, of_total.flip(1).cumsum(1).flip(1)


def by_torch(*inputs: Tensor) -> Tensor:
    return Dense.apply(*map(at_least_fp32, inputs)).to(inputs[2].dtype)


whole_blocks.on_cpus(
    simple_gla.operation,
    simple_gla.gradient,
    by_torch,
    lambda *given: (by_torch(*given).contiguous(), given[-1].clone()),
)


def result(
    mode: str,
    options: dict[str, Any],
    kernels: bool | None = None,
    version: bool = True,
    package: str = "fla",
    **how: Any,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients.

    Args:
        kernels: take the path of the kernels, which torch computes. Compiled blocks do.
        version: whether the package's is the tested one.
        package: whose kernels are chosen.
    """
    own = {"head_dim": 16, "state_size": 6, "chunk": 8, **options}
    with pytest.MonkeyPatch.context() as patch:
        if mode == "layer" if kernels is None else kernels:
            patch.setattr(mamba2, "choose_kernels", lambda *_: (package, "pretended"))
            patch.setattr(mamba2, "compiles", lambda: version)
            patch.setattr(mamba2, "CONVOLUTIONS", {package: causal_convolution})
            patch.setattr(simple_gla, "by_kernels", by_torch)
        return whole_blocks.result({"layers": f"mamba2 x{LAYERS}", "mamba2": own}, mode, **how)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    yield from whole_blocks.traced(monkeypatch)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as it is": ({}, {}),
    "documents, computed again": ({}, {"documents": True, "recompute": "full"}),
    "groups, limits": ({"groups": 2, "least_step": 0.02, "most_step": 0.05, "norm": "before_gate"}, {}),
    "biases": ({"bias": True, "convolution_bias": False, "convolution": 3, "norm": "none"}, {"documents": True}),
    "multipliers": ({"multipliers": {"z": 0.5, "x": 2.0, "B": 2.0, "C": 2.0, "dt": 0.5}, "input_multiplier": 3.0}, {}),
    "more taps than tokens": ({"convolution": 4}, {"length": 2}),
}


@pytest.mark.parametrize("name", toured(CASES))
def test_whole_blocks_are_plain_ones(graphs: list[str], name: str) -> None:
    options, how = CASES[name]
    wanted, found = (result(mode, options, **how) for mode in ("off", "layer"))
    assert len(graphs) == 1, "one for all blocks"
    assert "deepy.simple_gla" in graphs[0] and len(re.findall(r"linear\(", graphs[0])) == 2
    assert ("autograd_function_apply" in graphs[0]) == ("length" not in how)
    whole_blocks.assert_same(found, wanted)


CHANGES: dict[str, Any] = {
    "result": lambda layer: layer.zx.register_forward_hook(lambda _layer, _given, y: 2 * y),
    "input": lambda layer: layer.bc.register_forward_pre_hook(lambda _layer, given: (2 * given[0],)),
    "product": lambda layer: setattr(layer.dt, "linear", lambda x, weight, bias: 2 * nn.functional.linear(x, weight)),
}


@pytest.mark.parametrize("name", toured([*CHANGES, "multipliers"]))
def test_products_that_differ_are_computed_one_by_one(graphs: list[str], name: str) -> None:
    def change(model: nn.Module) -> None:
        for layer in model.modules():
            if isinstance(layer, mamba2.Mamba2) and name in CHANGES:
                CHANGES[name](layer)

    options = {} if name in CHANGES else {"multipliers": {"x": 2.0, "B": 0.5, "C": 3.0}}
    wanted, found = (result(mode, options, change=change) for mode in ("off", "layer"))
    assert len(graphs) == 1 and len(re.findall(r"linear\(", graphs[0])) >= 3
    whole_blocks.assert_same(found, wanted)


def test_layers_with_hooks_are_not_plain() -> None:
    for register in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
        layer = ColumnLinear(ParameterFactory(Mesh.single()), 4, (6,), init=ZEROS)
        assert layer.is_plain()
        getattr(layer, f"register_{register}")(lambda *_: None)
        assert not layer.is_plain(), register


@pytest.mark.parametrize("trained", toured(["none", "bc.weight", "_conv", "A_log"]))
def test_whole_blocks_are_whole_where_others_do_not_train(graphs: list[str], trained: str) -> None:
    """In evaluations, and with adapters."""
    wanted, found = (result(mode, {}, documents=True, trained=trained) for mode in ("off", "layer"))
    assert len(graphs) <= 2, "the embedding's result needs no gradient, so the first block may be compiled apart"
    assert all("deepy.simple_gla" in code for code in graphs)
    assert bool(wanted[1]) == (trained != "none")
    whole_blocks.assert_same(found, wanted)


@pytest.mark.parametrize("group", toured([7, 8]))
def test_whole_blocks_in_bf16_are_as_near_as_plain_ones(
    graphs: list[str], monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    """To float64. 2 * 24 tokens are no multiple of 7."""
    monkeypatch.setattr(over_tokens, "GROUP", group)
    narrow: Any = {"dtype": torch.bfloat16}
    exact, near, found = (
        by_kind(result(mode, {"head_dim": 4}, **how)[1])
        for mode, how in (("off", {}), ("off", {"kernels": True, **narrow}), ("layer", narrow))
    )
    assert len(graphs) == 1
    whole_blocks.assert_as_near(found, near, exact)


def by_kind(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of all layers together: a vector of few heads is near by chance."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, gradient in gradients.items():
        found.setdefault(re.sub(r"\.\d+\.", ".", name), []).append(gradient.flatten())
    return {name: torch.cat(each) for name, each in found.items()}


@pytest.mark.parametrize("reason", toured(["fp32", "another version", "torch"]))
def test_other_blocks_stay_in_parts(graphs: list[str], reason: str) -> None:
    """The kernels would round fp32, and the backward pass of another version may differ."""
    dtype = torch.float32 if reason == "fp32" else torch.float64
    result(
        "layer", {}, dtype=dtype, version=reason != "another version", package="torch" if reason == "torch" else "fla"
    )
    assert graphs and not any("simple_gla" in code for code in graphs)


def test_operations_are_what_torch_expects_of_them() -> None:
    """Shapes, types and memory of their results, and gradients, by torch's own checks."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 20, 2, width, dtype=torch.float64, requires_grad=True) for width in (6, 6, 16))
    decay = (-0.6 * torch.rand(2, 20, 2, dtype=torch.float64)).requires_grad_()
    torch.library.opcheck(simple_gla.operation, (query, key, value, decay))
    given = query, key, value[..., :3].contiguous(), decay
    assert torch.autograd.gradcheck(lambda *inputs: simple_gla.operation(*inputs)[0], given)
