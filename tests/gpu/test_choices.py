"""A choice by name gives the results of the default: FlashAttention's kernels, CUDA graphs, 8-bit products."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.config import Config, resolve
from megatron.config.arithmetic.machine import FA3, installed
from megatron.config.variants import overlay
from megatron.model.kernels.choice import use_flash_attention
from megatron.model.stack import build_model
from megatron.parallel.layers.async_tensor import check_async_tensor, gathered_through, scattered_product
from megatron.parallel.layers.collectives import enter, leave
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from tests.float64 import DOUBLE
from tests.gpu.test_parity import batch, computed, error, gradients

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MODEL = {
    "layers": "(attention/mlp attention@near/mlp) x1",
    "hidden_size": 256,
    "vocab_size": 97,
    "attention": {"heads": 4, "kv_heads": 2},
    "variants": {"near": {"window": 24}},
}


def settings(*, documents: bool = False, **sections: dict[str, Any]) -> Config:
    given = {
        "model": MODEL,
        "precision": {"compute": "bf16"},
        "training": {"steps": 1, "sequence_length": 64, "compile": "off"},
        "data": {"synthetic": "copy", "reset_attention_at_eod": documents},
        "tokenizer": {"eod_id": 0},
    }
    return resolve(overlay(given, sections))


@pytest.fixture(autouse=True)
def usual_attention():
    torch._dynamo.reset()
    yield
    use_flash_attention("auto", "cuda")


def near(usual: Config, chosen: Config) -> None:
    """To float64, up to twice what the usual kernels are."""
    wanted = computed(usual, "cpu", DOUBLE)
    spread = error(computed(usual, "cuda", torch.bfloat16), wanted)
    found = error(computed(chosen, "cuda", torch.bfloat16), wanted)
    assert found < 2 * spread, (found, spread)


@pytest.mark.parametrize("compiled", ["off", "layer"])
def test_documents_one_after_another(compiled: str) -> None:
    options = {"model": {"fused_attention": {"documents": "varlen"}}, "training": {"compile": compiled}}
    near(settings(documents=True), settings(documents=True, **options))


@pytest.mark.skipif(not installed(FA3), reason="needs FlashAttention 3")
@pytest.mark.parametrize("documents", ["auto", "varlen"])
def test_flash_attention_3(documents: str) -> None:
    apart = documents == "varlen"
    options = {"model": {"fused_attention": {"flash": "fa3", "documents": documents}}}
    near(settings(documents=apart), settings(documents=apart, **options))


def test_replayed_blocks_sum_the_same_gradients() -> None:
    """Of six micro-batches: the first warms up, the second is recorded, the others are replayed."""
    sums: list[dict[str, torch.Tensor]] = []
    for graphs in (False, True):
        torch._dynamo.reset()
        config = settings(training={"compile": "layer", "cuda_graphs": graphs})
        model = build_model(config, device="cuda", dtype=torch.bfloat16)
        data = batch(config)
        for number in range(6):
            tokens = (data["tokens"] + number) % config.model.vocab_size
            found = gradients(model, {**data, "tokens": tokens}, "cuda")
        sums.append(found)
    assert error(sums[1], sums[0]) < 1e-6  # the same kernels


def test_8_bit_products_are_those_of_the_cpu() -> None:
    """Up to what sums in another order decide about roundings: a tenth of what these do themselves."""
    plain, rounded = (settings(precision={"compute": "bf16", "products": each}) for each in ("compute", "fp8"))
    wanted, exact = computed(rounded, "cpu", torch.float32), computed(plain, "cpu", torch.float32)
    found = computed(rounded, "cuda", torch.float32)
    assert error(found, wanted) < 0.1 * error(wanted, exact)


def overlap(rank: int, store: str) -> None:
    """One of two ranks: a column and a row matrix, with its gradients, as the plain gather and scatter have them."""
    torch.cuda.set_device(rank)
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = Mesh.build(Layout(tensor=2, sequence=True, async_tensor=True))
    check_async_tensor(mesh.tensor, "cuda")

    def step(overlapping: bool, dtype: torch.dtype) -> list[torch.Tensor]:
        generator = torch.Generator("cuda").manual_seed(rank)
        drawn = [
            torch.randn(size, generator=generator, device="cuda") for size in ((2, 256, 512), (384, 512), (512, 384))
        ]
        x, up, down = (each.bfloat16().to(dtype).requires_grad_() for each in drawn)
        if overlapping:
            y = scattered_product(gathered_through(x, [up], mesh.tensor)[1][0], down, mesh.tensor)
        else:
            y = leave(enter(x, mesh) @ up.t() @ down.t(), mesh)
        y.backward(torch.ones_like(y))
        return [each.double() for each in (y.detach(), x.grad, up.grad, down.grad)]

    found, usual = step(True, torch.bfloat16), step(False, torch.bfloat16)
    for own, plain, exact in zip(found, usual, step(False, torch.float64)):
        assert (own - exact).norm() < 2 * (plain - exact).norm()
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_products_that_overlap_with_messages(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(overlap, (str(tmp_path / "store"),), nprocs=2)
