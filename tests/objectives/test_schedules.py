"""Objectives of post-training under schedules of a pipeline: losses and gradients equal one process."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.testing import check_layouts

SHAPE: dict[str, Any] = {
    "model": {"layers": "(attention/mlp) x4", "hidden_size": 32, "vocab_size": 48, "attention": {"heads": 4}},
    "training": {"steps": 1, "sequence_length": 16, "micro_batch_size": 2, "global_batch_size": 8, "loss_chunk": 7},
    "tokenizer": {"type": "none", "eod_id": 0},
    "data": {"reset_attention_at_eod": True},
}
POLICY = {"loss": "grpo", "mean": "label", "beta": 0.1, "kl": "k2", "clip_low": 1.0, "clip_high": 1e5}
CASES: list[tuple[str, dict[str, Any], str, int, int]] = [  # objective, options, schedule, stages per rank, ZeRO
    ("dpo", {}, "interleaved", 2, 1),
    ("kto", {"kl": False, "beta": 0.02}, "zb_h1", 1, 2),
    ("reward_model", {"margins": True, "centre": 0.02}, "zbv", 2, 3),
    ("policy", POLICY, "dualpipe_v", 2, 0),
    ("policy", POLICY, "asynchronous", 1, 1),
]


@pytest.mark.parametrize(("name", "options", "schedule", "each", "zero"), CASES)
def test_losses_and_gradients_are_those_of_one_process(name, options, schedule, each, zero):
    parallel = {"pipeline": 2, "stages_per_rank": each, "schedule": schedule}
    values = {**SHAPE, "objective": {"type": name, "options": options}}
    check_layouts(values, [{"parallel": parallel, "zero": {"stage": zero}}])
