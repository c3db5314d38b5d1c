"""Mistakes that initial values, short texts or a warning of transformers would hide."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.config import ConfigError, resolve
from megatron.decoding.schedule import Request, RequestError
from megatron.evaluation.scoring import Scorer
from megatron.kinds.transformers.build import hf_model
from megatron.kinds.transformers.check import with_noise
from megatron.kinds.transformers.options import TransformersOptions
from megatron.model.stack import build_model
from megatron.testing import on_ranks
from megatron.worker.place import StartError
from tests.kinds.transformers.steps import values_of
from tests.kinds.transformers.tiny import tiny
from tests.training.runs import build

ROTARY = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "longrope": {
        **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 10},
        **{"short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
    },
}


@pytest.mark.parametrize("kind", ROTARY)
@torch.no_grad()
def test_a_text_beyond_the_original_length_is_read_again(kind: str) -> None:
    """All its tokens then have other rotary angles, and the keys in a cache have the old ones."""
    own = {"rope_parameters": ROTARY[kind], "max_position_embeddings": 10 if kind == "dynamic" else 64, "head_dim": 8}
    model: Any = build_model(resolve(values_of("llama", {**tiny("llama"), "initializer_range": 0.3, **own}))).eval()
    tokens = torch.randint(0, 96, (2, 14), generator=torch.Generator().manual_seed(1))
    state, read = model.new_state(), 0
    assert model.memory == "past_key_values"
    for count in (6, 1, 1, 1, 1, 1, 2, 1):
        found = model.decode(tokens[:, read : read + count], state, read)
        read += count
        wanted = model.head.logits(model.stream(tokens[:, :read]))[:, -count:]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, msg=f"{read} tokens")


def test_constant_matrices_get_noise_for_the_comparison() -> None:
    """A bias of each expert is a matrix of zeros at first."""
    model = hf_model(TransformersOptions(config="gpt_oss", options=tiny("gpt_oss")).model_dump())
    own, name = with_noise(model), "model.layers.0.mlp.experts.down_proj_bias"
    assert own[name].abs().max() == 0 < model.get_parameter(name).abs().max()
    assert "model.layers.0.self_attn.q_proj.weight" not in own


def folder_of(place: Path, name: str = "llama") -> Path:
    build_model(resolve(values_of(name, tiny(name)))).as_saved(torch.float32).save_pretrained(place)
    return place


def test_folders_with_weights_that_the_settings_leave_out_are_refused(tmp_path: Path) -> None:
    weights = load_file(folder_of(tmp_path) / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.ones(32)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(StartError, match=r"has 1 more, such as model\.layers\.0\.self_attn\.q_proj\.bias"):
        build_model(resolve(values_of(str(tmp_path), {}, weights=True)))
    del weights["model.layers.0.self_attn.q_proj.bias"]
    weights["vision.proj.weight"] = torch.ones(2, 2)  # of another model in the folder
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    build_model(resolve(values_of(str(tmp_path), {}, weights=True)))
    build_model(resolve(values_of(str(tmp_path), {"num_hidden_layers": 1}, weights=True)))


def test_folders_with_adapters_are_refused(tmp_path: Path) -> None:
    """transformers adds them where peft is installed, and is silent elsewhere."""
    (folder_of(tmp_path) / "adapter_config.json").write_text("{}")
    with pytest.raises(StartError, match=r"no adapter_config\.json"):
        build_model(resolve(values_of(str(tmp_path), {}, weights=True)))


def test_settings_of_quantized_weights_are_not_of_the_model(tmp_path: Path) -> None:
    """Its export would be opened as quantized."""
    settings = {**tiny("llama"), "model_type": "llama", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    model: Any = build_model(resolve(values_of(str(tmp_path), {})))
    assert not hasattr(model.as_saved(torch.float32).config, "quantization_config")


@pytest.mark.parametrize("of_folder", (False, True))
def test_a_model_without_end_is_refused(tmp_path: Path, of_folder: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "num_hidden_layers": 10**9}))
    with pytest.raises(ConfigError, match="num_hidden_layers must be at most"):
        resolve(values_of(str(tmp_path if of_folder else tmp_path / "config.json"), {}))


def refused_by_scorer(values: dict[str, Any], ranks: int) -> str:
    config = resolve(values, ranks=ranks)
    engine = build(config, ranks)
    scorer = Scorer(config, engine, engine.mesh, engine.device, texts=2)
    with pytest.raises(RequestError) as caught:
        scorer.answer([Request((1, 2), 2, 0), Request((1, 2), 64, 1)])
    return str(caught.value)


def test_requests_beyond_the_learned_positions_are_refused_before_any_begins() -> None:
    """One rank would fail in its text, and the other one wait."""
    said = on_ranks(2, refused_by_scorer, values_of("gpt2", tiny("gpt2")), 2)
    assert all("has 65 tokens to read, and the model 64 positions" in each for each in said)
