"""Texts of the samples hook."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from megatron.config import resolve
from megatron.engine.engine import PlainEngine
from megatron.model.stack import build_model
from megatron.parallel.layout.mesh import Mesh
from megatron.training.sampler import sampler

PROMPTS = ["ab", "", "ab"]
GIVEN: dict[str, Any] = {
    "model": {"layers": "attention/mlp", "hidden_size": 32, "vocab_size": 258, "attention": {"heads": 4}},
    "training": {"steps": 1, "sequence_length": 64},
    "tokenizer": {"type": "bytes"},
    "evaluation": {"samples": {"every": 1, "prompts": PROMPTS, "tokens": 6}},
}


def engine_of(model: Any) -> Any:
    engine = MagicMock(spec=PlainEngine)
    engine.model, engine.state, engine.mesh, engine.device = model, MagicMock(), Mesh.single(), torch.device("cpu")
    return engine


def test_each_prompt_has_draws_of_its_own() -> None:
    config = resolve(GIVEN)
    model = build_model(config).train()
    make = sampler(config, engine_of(model), pytest.fail)
    assert make is not None
    texts = make(PROMPTS, config.evaluation.samples, 1)
    assert texts[0] and texts[0] != texts[2] and texts[1] == "" and model.training


@pytest.mark.parametrize("parallel", [{"context": 2}, {"tensor": 2, "sequence": True}])
def test_ranks_that_share_texts(parallel: dict[str, Any]) -> None:
    lines: list[str] = []
    assert sampler(resolve({**GIVEN, "parallel": parallel}, ranks=2), engine_of(None), lines.append) is None
    assert lines == ["no samples during training: ranks share the tokens of a text. Use generate.py on a checkpoint"]
