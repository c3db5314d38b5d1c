"""KTO, reward models and policy losses of a model with experts, Mamba-2 and RWKV-7, on layouts against one process."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.testing.layouts import check_layouts

SHAPE: dict[str, Any] = {
    "model": {
        "layers": "mamba2 rwkv7/mlp attention/moe attention/mlp",
        "hidden_size": 32,
        "vocab_size": 48,
        "norm": {"type": "rmsnorm"},
        "attention": {"heads": 4},
        "mamba2": {"head_dim": 8, "state_size": 8, "groups": 2, "chunk": 6},
        "rwkv7": {"head_dim": 8, "chunk": 6, "decay_rank": 4, "rate_rank": 4, "value_rank": 4, "gate_rank": 4},
        "moe": {"experts": 4, "hidden_size": 16, "losses": {"balance": 0.0}},  # one process has the objective only
    },
    "training": {"steps": 1, "sequence_length": 16, "micro_batch_size": 2, "global_batch_size": 4, "loss_chunk": 7},
    "tokenizer": {"type": "none", "eod_id": 0},
    "data": {"reset_attention_at_eod": True},
}
OBJECTIVES = {
    "kto": {"kl": False, "beta": 0.02},
    "reward_model": {"margins": True, "centre": 0.02},
    "policy": {"loss": "grpo", "mean": "label", "beta": 0.1, "kl": "k2", "clip_low": 1.0, "clip_high": 1e5},
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_and_gradients_are_those_of_one_process(name):
    layouts: list[dict[str, Any]] = [{"parallel": {each: 2}} for each in ("tensor", "pipeline", "context")]
    layouts += [{"zero": {"stage": 1}}, {"zero": {"stage": 3}}]
    check_layouts({**SHAPE, "objective": {"type": name, "options": OBJECTIVES[name]}}, layouts)
