"""Packages of kernels give what torch gives, in bf16, as near to float64. With documents and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.config import Config, resolve
from megatron.config.arithmetic.machine import installed
from tests.float64 import DOUBLE
from tests.gpu.test_parity import computed, error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MODELS: dict[str, dict[str, Any]] = {
    "mamba2": {"layers": "mamba2 x2", "mamba2": {"head_dim": 64, "state_size": 64, "groups": 2}},
    "rwkv7": {"layers": "(rwkv7/rwkv7_ffn) x2", "rwkv7": {"head_dim": 64}},
    "gated_delta": {
        "layers": "gated_delta/mlp x2",
        "gated_delta": {"heads": 4, "key_heads": 2, "key_dim": 64, "value_dim": 64},
    },
}


def settings(name: str, kernels: str, documents: bool, length: int = 192) -> Config:
    return resolve({
        "model": {"hidden_size": 256, "vocab_size": 97, "kernels": kernels, **MODELS[name]},
        "training": {"steps": 1, "sequence_length": length, "compile": "off"},
        "data": {"reset_attention_at_eod": documents, "options": {"eod": 0}},
    })


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_kernels_are_as_near_as_torch(name: str, documents: bool) -> None:
    """They keep 16 bits between chunks, and torch 32: so twice its distance, and the same again."""
    if not installed("fla"):
        pytest.skip("needs flash-linear-attention")
    wanted = computed(settings(name, "torch", documents), "cpu", DOUBLE)
    spread = error(computed(settings(name, "torch", documents), "cuda", torch.bfloat16), wanted)
    found = error(computed(settings(name, "fla", documents), "cuda", torch.bfloat16), wanted)
    assert found < 4 * spread, (found, spread)


@pytest.mark.parametrize("layers", ["(attention/mlp) x2", "(attention/moe) x2"])
def test_what_is_compiled_is_one_graph(layers: str) -> None:
    """A break before and after attention would copy queries, keys, values and their gradients."""
    torch._dynamo.reset()
    model = {"layers": layers, "hidden_size": 64, "vocab_size": 97, "attention": {"heads": 2}}
    experts = {"moe": {"experts": 4, "top_k": 2, "hidden_size": 64}} if "moe" in layers else {}
    training = {"steps": 1, "sequence_length": 64, "compile": "layer"}
    computed(resolve({"model": {**model, **experts}, "training": training}), "cuda", torch.bfloat16)
    assert not torch._dynamo.utils.counters["graph_break"]
