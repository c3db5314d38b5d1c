"""Inner channels of Mamba-2 that are given, not a multiple of the model's."""

from __future__ import annotations

from megatron.config import resolve
from megatron.model.stack import build_model
from megatron.testing import check_counts, check_decoding

VALUES = {
    "model": {
        "layers": "mamba2 x2",
        "hidden_size": 24,
        "vocab_size": 37,
        "mamba2": {"inner_size": 40, "head_dim": 10, "state_size": 6, "groups": 2, "chunk": 5},
    },
    "training": {"steps": 1, "sequence_length": 15},
}


def test_counts_and_decoding():
    check_counts(VALUES)
    check_decoding(VALUES, (7, 1, 4))
    model = build_model(resolve(VALUES), device="meta")
    assert model.blocks[0].mixer.output.weight.shape == (24, 40)
