"""RWKV-7 blocks that are compiled as a whole, with the kernels as operations, next to plain blocks in float64. Torch
computes the operations here."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron.kinds.common.recurrence import operations
from megatron.kinds.rwkv import rwkv7, wkv7_kernels
from megatron.kinds.rwkv.parts import LowRank
from megatron.kinds.rwkv.wkv7 import wkv7
from megatron.parallel.layers import over_tokens
from megatron.parallel.layout.precision import at_least_fp32
from tests.kinds import whole_blocks
from tests.paths import ROOT
from tests.selection import toured

CHANGES: dict[str, Callable[[LowRank], Any]] = {
    "result": lambda rank: rank.up.register_forward_hook(lambda _layer, _given, y: 2 * y),
    "input": lambda rank: rank.down.register_forward_pre_hook(lambda _layer, given: (2 * given[0],)),
    "activation": lambda rank: setattr(rank, "activation", torch.nn.functional.silu),
}


MODEL = {
    "layers": "(rwkv7/rwkv7_ffn) x3",
    "rwkv7": {"head_dim": 16, "decay_rank": 5, "rate_rank": 3, "value_rank": 2, "gate_rank": 4},
}
result = partial(whole_blocks.result, MODEL)


def by_torch(*inputs: Any) -> torch.Tensor:
    *given, starts_BS = inputs
    y, _ = wkv7(*map(at_least_fp32, given), chunk=wkv7_kernels.CHUNK, starts_BS=starts_BS)
    return y.to(given[3].dtype)


whole_blocks.on_cpus(
    wkv7_kernels.operation, wkv7_kernels.gradient, by_torch, lambda *inputs: by_torch(*inputs).contiguous()
)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Torch computes the kernels, also in plain blocks."""
    monkeypatch.setattr(rwkv7, "choose_kernels", lambda *_: ("fla", "pretended"))
    monkeypatch.setattr(rwkv7, "compiles", lambda: True)
    monkeypatch.setattr(wkv7_kernels, "forward_by_kernels", by_torch)
    yield from whole_blocks.traced(monkeypatch)


def changed(change: str, model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, rwkv7.RWKV7) and change:
            CHANGES[change](layer.rate)


@pytest.mark.parametrize(
    ("recompute", "documents", "change"),
    toured([
        ("none", False, ""),
        ("full", True, ""),
        *(("none", False, change) for change in CHANGES),
        pytest.param("none", True, "", marks=pytest.mark.slow),
    ]),
)
def test_whole_blocks_are_plain_ones(graphs: list[str], recompute: str, documents: bool, change: str) -> None:
    wanted, found = (result(each, recompute, documents, change=partial(changed, change)) for each in ("off", "layer"))
    assert len(graphs) == 2, "one for the first block, and one for all others"
    for code, ranks in zip(graphs, (3, 4)):
        assert "deepy.wkv7" in code and "autograd_function_apply" in code
        assert len(re.findall(r"linear\(", code)) == 4 + 2 + bool(change) * 2 * ranks  # four of H, two of ffn
    whole_blocks.assert_same(found, wanted)


@pytest.mark.parametrize("trained", toured(["none", "key.weight"]))
def test_whole_blocks_are_whole_where_norms_do_not_train(graphs: list[str], trained: str) -> None:
    """In evaluations, and with adapters."""
    wanted, found = (result(mode, "none", True, trained=trained) for mode in ("off", "layer"))
    assert len(graphs) <= 3, "the embedding's result needs no gradient, so the first two blocks may be compiled apart"
    assert all("deepy.wkv7" in code for code in graphs)
    assert bool(wanted[1]) == (trained != "none")
    whole_blocks.assert_same(found, wanted)


@pytest.mark.tour
def test_blocks_in_fp32_are_compiled_in_parts(graphs: list[str]) -> None:
    """Their recurrence is torch's, whose loops over chunks would cut a block, and keep what it computes again."""
    (_, exact), (_, near) = (result("off", "none", True, dtype) for dtype in (torch.float64, torch.float32))
    _, found = result("layer", "none", True, torch.float32)
    assert graphs and not any(re.search(r"linear\(|bmm|wkv7", code) for code in graphs)
    whole_blocks.assert_as_near(found, near, exact, rounding=2**-24)


@pytest.mark.tour
@pytest.mark.parametrize("group", [7, 8])
def test_whole_blocks_in_bf16_are_as_near_as_plain_ones(
    graphs: list[str], monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    """To float64. 2 * 24 tokens are no multiple of 7."""
    monkeypatch.setattr(over_tokens, "GROUP", group)
    (_, exact), (_, near) = (result("off", dtype=dtype) for dtype in (torch.float64, torch.bfloat16))
    _, found = result("layer", dtype=torch.bfloat16)
    assert len(graphs) == 2
    whole_blocks.assert_as_near(found, near, exact)


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
    monkeypatch.setattr(operations, "installed", lambda package: True)
    for version, compiles in ((operations.TESTED, True), ("0.6.1", False), (None, False)):

        def found(package: str, version: str | None = version) -> str:
            if version is None:
                raise metadata.PackageNotFoundError(package)
            return version

        monkeypatch.setattr(metadata, "version", found)
        assert operations.compiles() == compiles


def test_the_backward_pass_is_that_of_the_pinned_version() -> None:
    pinned = re.search(r"^flash-linear-attention==(\S+)", Path(ROOT / "requirements/gpu.txt").read_text(), re.M)
    assert pinned and pinned[1] == operations.TESTED
