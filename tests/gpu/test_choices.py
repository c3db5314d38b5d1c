"""What is asked for by name gives what is chosen otherwise: FlashAttention's kernels, CUDA graphs, 8-bit products."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.config import Config, resolve
from megatron.config.fused_attention import FA3
from megatron.config.kernels import installed
from megatron.config.variants import overlay
from megatron.model.flash_attention import use_flash_attention
from megatron.model.stack import build_model
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
