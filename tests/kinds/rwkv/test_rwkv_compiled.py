"""RWKV-7 blocks that are compiled as a whole, with the kernels as operations, next to plain blocks in float64. Torch
computes the operations here."""

import re
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config import resolve
from megatron.kinds.rwkv import rwkv7, wkv7_kernels
from megatron.kinds.rwkv.parts import LowRank
from megatron.model.stack import build_model
from megatron.parallel.layers import over_tokens
from tests.paths import ROOT

V, S = 61, 24
CHANGES: dict[str, Callable[[LowRank], Any]] = {
    "result": lambda rank: rank.up.register_forward_hook(lambda _layer, _given, y: 2 * y),
    "input": lambda rank: rank.down.register_forward_pre_hook(lambda _layer, given: (2 * given[0],)),
    "activation": lambda rank: setattr(rank, "activation", torch.nn.functional.silu),
}


def result(
    mode: str, recompute: str, documents: bool, dtype: torch.dtype = torch.float64, change: str = "", trained: str = ""
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients.

    Args:
        change: of a matrix of low rank: a hook, such as that of an adapter, or another activation.
        trained: parameters with this in their name. With "none" autograd does not run.
    """
    config = resolve({
        "model": {
            "layers": "(rwkv7/rwkv7_ffn) x3",
            "hidden_size": 32,
            "vocab_size": V,
            "norm": {"type": "layernorm", "bias": True},
            "rwkv7": {"head_dim": 16, "decay_rank": 5, "rate_rank": 3, "value_rank": 2, "gate_rank": 4},
        },
        "training": {
            "steps": 1,
            "sequence_length": S,
            "compile": mode,
            "activation_checkpointing": {"mode": recompute},
        },
        "data": {"reset_attention_at_eod": documents},
        "tokenizer": {"eod_id": 0},
    })
    model, draws = build_model(config, dtype=dtype), torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # matrices of low rank start at 0
        drawn = 0.1 * torch.randn(parameter.shape, generator=draws, dtype=torch.float64)
        parameter.data = (parameter.data + drawn).bfloat16().to(parameter.dtype)
    for layer in model.modules():
        if isinstance(layer, rwkv7.RWKV7) and change:
            CHANGES[change](layer.rate)
    tokens = torch.randint(V, (2, S + 1), generator=draws)
    numbers = (torch.arange(S) >= torch.tensor([[7], [16]])).long()
    channels = {"documents": numbers, "positions": torch.zeros_like(numbers)} if documents else {}
    for parameter in model.parameters():
        parameter.requires_grad_(trained in parameter.logical.name)
    with torch.set_grad_enabled(trained != "none"):
        loss, _ = model(tokens[:, :-1], tokens[:, 1:], torch.full((2, S), 1 / (2 * S)), **channels)
    if loss.requires_grad:
        loss.backward()
    gradients = {each.logical.name: each.grad for each in model.parameters()}
    return loss.detach(), {name: each for name, each in gradients.items() if each is not None}


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The graphs of compiled blocks. Torch computes the kernels, also in plain blocks."""
    found: list[str] = []

    def seen(graph: torch.fx.GraphModule, inputs: list) -> torch.fx.GraphModule:
        found.append(graph.code)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile
    monkeypatch.setattr("torch.compile", lambda forward, dynamic, options: compiled(forward, backend=seen))
    monkeypatch.setattr(rwkv7, "choose_kernels", lambda *_: ("fla", "pretended"))
    monkeypatch.setattr(rwkv7, "compiles", lambda: True)
    monkeypatch.setattr(wkv7_kernels, "forward_by_kernels", wkv7_kernels.by_torch)
    monkeypatch.setattr(over_tokens, "GROUP", 8)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # of other tests
    yield found
    torch._dynamo.reset()
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize(
    ("recompute", "documents", "change"),
    [
        ("none", False, ""),
        ("full", True, ""),
        *(("none", False, change) for change in CHANGES),
        pytest.param("none", True, "", marks=pytest.mark.slow),
    ],
)
def test_whole_blocks_are_plain_ones(graphs: list[str], recompute: str, documents: bool, change: str) -> None:
    loss, wanted = result("off", recompute, documents, change=change)
    found_loss, found = result("layer", recompute, documents, change=change)
    assert len(graphs) == 2, "one for the first block, and one for all others"
    for code, ranks in zip(graphs, (3, 4)):
        assert "deepy.wkv7" in code and "autograd_function_apply" in code
        assert len(re.findall(r"linear\(", code)) == 4 + 2 + bool(change) * 2 * ranks  # four of H, two of ffn
    torch.testing.assert_close(found_loss, loss, rtol=1e-12, atol=0)
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 1e-10 * gradient.norm(), name


@pytest.mark.parametrize("trained", ["none", "key.weight"])
def test_whole_blocks_are_whole_where_norms_do_not_train(graphs: list[str], trained: str) -> None:
    """In evaluations, and with adapters."""
    loss, wanted = result("off", "none", True, trained=trained)
    found_loss, found = result("layer", "none", True, trained=trained)
    assert len(graphs) <= 3, "the embedding's result needs no gradient, so the first two blocks may be compiled apart"
    assert all("deepy.wkv7" in code for code in graphs)
    torch.testing.assert_close(found_loss, loss, rtol=1e-12, atol=0)
    assert found.keys() == wanted.keys() and bool(wanted) == (trained != "none")
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 1e-10 * gradient.norm(), name


def test_blocks_in_fp32_are_compiled_in_parts(graphs: list[str]) -> None:
    """Their recurrence is torch's, whose loops over chunks would cut a block, and keep what it computes again."""
    loss, wanted = result("off", "none", True, torch.float32)
    found_loss, found = result("layer", "none", True, torch.float32)
    assert graphs and not any(re.search(r"linear\(|bmm|wkv7", code) for code in graphs)
    torch.testing.assert_close(found_loss, loss, rtol=1e-5, atol=0)
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 1e-4 * gradient.norm(), name


@pytest.mark.parametrize("group", [8, 7])
def test_whole_blocks_in_bf16_are_as_near_as_plain_ones(
    graphs: list[str], monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    """To float64. 2 * 24 tokens are no multiple of 7."""
    monkeypatch.setattr(over_tokens, "GROUP", group)
    _, exact = result("off", "none", False)
    _, near = result("off", "none", False, torch.bfloat16)
    _, found = result("layer", "none", False, torch.bfloat16)
    assert len(graphs) == 2
    for name, gradient in exact.items():
        bound = 1.25 * (near[name] - gradient).norm() + 2**-9 * gradient.norm()  # sums of another order, one rounding
        assert (found[name] - gradient).norm() <= bound, name


def test_operations_are_what_torch_expects_of_them() -> None:
    """Shapes, types and memory of their results, and gradients, by torch's own checks."""
    torch.manual_seed(0)
    r, k, v, a = (torch.randn(2, 20, 2, 16, dtype=torch.float64, requires_grad=True) for _ in range(4))
    log_w = (-0.6 * torch.rand(2, 20, 2, 16, dtype=torch.float64)).requires_grad_()
    starts = torch.where(torch.arange(20) < 11, 0, 11).expand(2, -1).contiguous()
    for each in (None, starts):
        torch.library.opcheck(wkv7_kernels.operation, (r, log_w, k, v, a / 8, a / 4, each))


def test_packages_of_no_known_version_do_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-linear-attention had no fla-core at first, and a folder of its files has no version."""
    monkeypatch.setattr(wkv7_kernels, "installed", lambda package: True)
    for version, compiles in ((wkv7_kernels.TESTED, True), ("0.6.1", False), (None, False)):

        def found(package: str, version: str | None = version) -> str:
            if version is None:
                raise metadata.PackageNotFoundError(package)
            return version

        monkeypatch.setattr(metadata, "version", found)
        assert wkv7_kernels.compiles() == compiles


def test_the_backward_pass_is_that_of_the_pinned_version() -> None:
    pinned = re.search(r"^flash-linear-attention==(\S+)", Path(ROOT / "requirements/gpu.txt").read_text(), re.M)
    assert pinned and pinned[1] == wkv7_kernels.TESTED
