"""Texts continued by a pipeline whose ranks have several stages, with cached states, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.decoding.decoder import Decoder
from megatron.decoding.schedule import Request
from tests.decoding.test_company import requests
from tests.model.parity import relative
from tests.training import runs
from tests.workers import run

VALUES: dict[str, Any] = {
    "model": {
        "layers": "(attention/mlp mamba2/mlp) x2",
        "hidden_size": 32,
        "vocab_size": 61,
        "attention": {"heads": 4},
        "mamba2": {"head_dim": 16, "state_size": 16},
    },
    "training": {"steps": 1, "sequence_length": 64, "micro_batch_size": 1, "global_batch_size": 4},
    "precision": {"compute": "fp32"},
}


def continued(values: dict[str, Any], ranks: int) -> tuple[list[tuple[int, ...]], dict[tuple[int, int], torch.Tensor]]:
    """(chosen tokens of each text, logits of each token) on this rank."""
    _, engine = runs.start(values, ranks)
    logits: dict[tuple[int, int], torch.Tensor] = {}
    decoder = Decoder(engine, "cpu", rows=3, budget=20, stages=engine.mesh.pipeline)
    decoder.logits = lambda live, place, row: logits.__setitem__((live.request.number, place), row.clone())
    asked: list[Request] = requests()[:4]
    return [tuple(each.tokens) for each in decoder.run(asked)], logits


@pytest.mark.parametrize("schedule, zero", [("zbv", 0), ("interleaved", 3)])
def test_texts_are_those_of_one_process(schedule: str, zero: int):
    """Prompts of several lengths that are read in pieces, then sampled tokens, each on all ranks."""
    layout = {"parallel": {"pipeline": 2, "stages_per_rank": 2, "schedule": schedule}, "zero": {"stage": zero}}
    ((texts, expected),) = run(1, continued, VALUES, 1)
    assert len(texts) == 4 and all(texts)
    for found, logits in run(2, continued, {**VALUES, **layout}, 2):
        assert found == texts and logits.keys() == expected.keys()
        for place, row in logits.items():
            assert relative(row, expected[place]) < 1e-5
