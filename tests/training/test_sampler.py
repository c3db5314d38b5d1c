"""Texts of the samples hook."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from megatron.config import resolve
from megatron.decoding.decoder import WholeModel
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
    engine.state, engine.mesh, engine.device, own = MagicMock(), Mesh.single(), torch.device("cpu"), WholeModel(model)
    engine.config, engine.new_state, engine.read_on = model.plan.config, own.new_state, own.read_on
    return engine


def test_each_prompt_has_draws_of_its_own() -> None:
    config = resolve(GIVEN)
    make = sampler(config, engine_of(build_model(config)), pytest.fail)
    assert make is not None
    texts = make(PROMPTS, config.evaluation.samples, 1)
    assert texts[0] and texts[0] != texts[2] and texts[1] == ""


@pytest.mark.parametrize("parallel", [{"context": 2}, {"tensor": 2, "sequence": True}])
def test_ranks_that_share_texts(parallel: dict[str, Any]) -> None:
    """They have the decoder, unless positions turn by the length of the text."""
    lines: list[str] = []
    given = {**GIVEN, "parallel": parallel}
    assert sampler(resolve(given, ranks=2), MagicMock(spec=PlainEngine), pytest.fail) is not None
    scaling = {"type": "dynamic", "factor": 2.0, "original_length": 16}
    given["model"] = {**GIVEN["model"], "attention": {"heads": 4, "rotary": {"scaling": scaling}}}
    assert sampler(resolve(given, ranks=2), MagicMock(spec=PlainEngine), lines.append) is None
    assert len(lines) == 1 and lines[0].startswith("no samples during training: no rank reads a whole text, and")
