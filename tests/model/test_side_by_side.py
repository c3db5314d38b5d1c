"""Mixers that read the same: their outputs are summed, whatever they are, and each computes the same as by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.config import resolve
from megatron.model.block import Block
from megatron.model.stack import build_model
from megatron.testing import check_counts, check_decoding
from tests.float64 import DOUBLE, EXACT
from tests.model.parity import named, randomise, relative

BASE = {
    "hidden_size": 24,
    "vocab_size": 37,
    "attention": {"heads": 4, "kv_heads": 2, "input_multiplier": 0.7, "output_multiplier": 1.3},
    "mamba2": {
        **{"inner_size": 40, "head_dim": 10, "state_size": 6, "groups": 2, "chunk": 5, "norm": "none"},
        **{"multipliers": {"z": 0.5, "x": 0.6, "B": 0.7, "C": 0.8, "dt": 0.9}, "output_multiplier": 0.4},
    },
    "rwkv7": {"head_dim": 8},
    "mlp": {"gated": True, "hidden_size": 32, "gate_multiplier": 0.6, "output_multiplier": 1.7},
}
LAYERS = ["(attention&mamba2/mlp) x2", "rwkv7&attention rwkv7/mlp", "mamba2&attention&rwkv7/mlp"]


def values(layers: str) -> dict:
    return {"model": {**BASE, "layers": layers}, "training": {"steps": 1, "sequence_length": 15}}


@pytest.mark.parametrize("layers", LAYERS)
def test_counts_and_decoding(layers: str):
    check_counts(values(layers))
    check_decoding(values(layers), (7, 1, 4))


@pytest.mark.parametrize("form", ["sequential", "parallel"])
def test_outputs_are_summed(form: str):
    """The same as blocks of one mixer each, with its weights: x + (a(x) + b(x)) = x + a(x) + b(x)."""
    whole = {**BASE, "layers": "attention&mamba2/mlp", "residual": {"form": form}}
    model = build_model(resolve({"model": whole, "training": values("mlp")["training"]}), dtype=DOUBLE)
    randomise(model, seed=1)
    block: Block = model.blocks[0]
    stream = model.embedding(torch.arange(15).view(1, 15), None)
    x = stream.hidden
    normed = block.mixer_norm(x)
    mixed = sum(layer(normed, stream) for layer in block.mixer.values())
    after = x if form == "parallel" else x + mixed
    wanted = (x + mixed if form == "parallel" else after) + block.ffn(block.ffn_norm(after), stream)
    assert relative(block(replace(stream)).hidden, wanted) < EXACT
    names = set(named(model))
    assert {"layers.0.attention.query.weight", "layers.0.mamba2.zx.weight", "layers.0.mlp.down.weight"} <= names
