"""Stages of sequence length as configurations of their own."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.config import ConfigError, resolve
from megatron.config.problems import divisors
from megatron.config.sequences import as_stage, stages_of


def values(length: int, chunks: int, *stages: int, context: int = 1) -> dict[str, Any]:
    schedule = [{"until": number, "sequence_length": stage} for number, stage in enumerate(stages, 1)]
    return {
        "model": {
            "layers": "mamba2/mlp attention/mlp",
            "hidden_size": 32,
            "vocab_size": 64,
            "attention": {"heads": 4},
            "mamba2": {"head_dim": 8},
        },
        "training": {
            "steps": 10,
            "sequence_length": length,
            "sequence_chunks": chunks,
            "sequence_schedule": schedule,
            "micro_batch_size": 1,
            "global_batch_size": 2,
        },
        "parallel": {"context": context},
        "data": {"synthetic": "copy"},
    }


def test_chunks_have_as_many_tokens_in_each_stage():
    """Or a divisor of them, where these do not divide a stage's length."""
    config = resolve(values(96, 4, 12, 24, 32, 48))
    found = [as_stage(config, stage).training for stage in stages_of(config)]
    assert [each.sequence_length for each in found] == [12, 24, 32, 48, 96]
    assert [each.sequence_length // each.sequence_chunks for each in found] == [12, 24, 8, 24, 24]


def test_convolutions_look_back_within_the_chunks_that_a_stage_has():
    """Ranks have 4 tokens of each chunk of 8, and of a stage of 8 tokens, which is one chunk. Of one of 4 just 2."""
    resolve(values(64, 8, 8, 16, context=2), ranks=2)
    with pytest.raises(ConfigError, match="must have the 3 tokens that convolutions of the next one look back to"):
        resolve(values(64, 8, 4, context=2), ranks=2)


def test_divisors_of_any_number():
    for number in range(200):
        assert divisors(number) == [each for each in range(1, number + 1) if number % each == 0]
    largest = 2**31 - 1  # a prime. A length that a configuration may have
    assert divisors(largest) == [1, largest] and len(divisors(2**30)) == 31
