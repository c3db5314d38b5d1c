"""Models that cannot be imported or exported are refused in a sentence before anything is loaded or written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers as hf
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megatron.checkpoint import CheckpointError, open_checkpoint
from megatron.checkpoint.hf.config import hf_config, names
from megatron.checkpoint.hf.export import config_of
from megatron.checkpoint.hf.importer import settings
from megatron.config import ConfigError, resolve
from tests.checkpoint.hf.test_hf_tools import tool
from tests.model.test_parity import CASES

OTHERS = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(names()))
SHORTEST = {CASES[name].model_type: name for name in reversed(CASES)}


@pytest.mark.parametrize("case, length", [("mamba", 2048), ("mamba2 grouped", 2048), ("rwkv", 1024), ("gpt2", 24)])
def test_models_are_imported_without_a_sequence_length(case: str, length: int, tmp_path: Path) -> None:
    hf.AutoModelForCausalLM.from_config(CASES[case]).save_pretrained(tmp_path / "model")
    assert tool("from_hf").main([str(tmp_path / "model"), str(tmp_path / "out")]) == 0
    assert config_of(open_checkpoint(tmp_path / "out")).training.sequence_length == length


def test_all_other_architectures_are_refused_by_name(tmp_path: Path, capsys) -> None:
    """The folder has no weights: nothing but the configuration can have been read."""
    assert {"bloom", "falcon_mamba", "opt"} <= set(OTHERS)
    for name in OTHERS:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
        assert tool("from_hf").main([str(tmp_path), str(tmp_path / "out")]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"from_hf: {name}: models of this architecture are not exchanged") and "llama" in said


@pytest.mark.parametrize(
    "text, words",
    [
        (None, "config.json cannot be read"),
        ("{", "it is damaged"),
        ("[]", "has no model_type"),
        ('{"model_type": 3}', "not exchanged"),
        ('{"model_type": "mine", "auto_map": {"AutoConfig": "evil.Config"}}', "not exchanged"),
        ('{"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}', "quantised"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "transformers does not accept it"),
    ],
)
def test_a_configuration_that_is_none(text: str | None, words: str, tmp_path: Path, capsys) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert tool("from_hf").main([str(tmp_path), str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err


STRANGE = (None, -1, "x", 0, [], {}, [None], 1e400)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "every"])
@pytest.mark.parametrize("kind", sorted(names()))
def test_strange_values_are_refused_or_taken(kind: str, every: bool, tmp_path: Path) -> None:
    """Every setting in turn lost, empty, negative, of another type: an error that names something, never another.

    Not every setting of every architecture gets every value, but most settings belong to several architectures. A
    plain run takes two of the eight values in turn, other ones for the next setting and architecture.
    """
    good = json.loads(CASES[SHORTEST[kind]].to_json_string(use_diff=False))
    refused, turn = 0, sorted(names()).index(kind)
    for place, name in enumerate(sorted(good)):
        for value in STRANGE if every else (STRANGE[(place + turn) % 8], STRANGE[(place + turn + 3) % 8]):
            if name == "model_type":
                continue
            (tmp_path / "config.json").write_text(json.dumps({**good, name: value}))
            try:
                settings(tmp_path)
            except (CheckpointError, ConfigError) as error:
                refused += 1
                assert str(error)
    assert refused > 15


BASE = {"hidden_size": 32, "vocab_size": 61, "norm": {"type": "rmsnorm"}}
ATTENTION = {"heads": 4, "position": "none"}


def run(model: dict):
    return resolve({"model": {**BASE, **model}, "training": {"steps": 1, "sequence_length": 16}})


@pytest.mark.parametrize(
    "model, words",
    [
        (
            {"layers": "(rwkv6/rwkv6_ffn) x2", "rwkv6": {"head_dim": 16}},
            "no class of transformers computes rwkv6, rwkv6_ffn; .*to-rwkv",
        ),
        ({"layers": "(rwkv7/rwkv7_ffn) x2", "rwkv7": {"head_dim": 16}}, "to-rwkv"),
        ({"layers": "(rwkv7/mlp) x2", "rwkv7": {"head_dim": 16}}, "no class of transformers computes rwkv7; .*to-rwkv"),
        (
            {"layers": "gated_delta/mlp attention/mlp", "attention": {"heads": 4}, "gated_delta": {"heads": 4}},
            "Qwen3_5ForCausalLM",
        ),
        (
            {"layers": "gated_delta/mlp attention/moe", "attention": {"heads": 4}, "gated_delta": {"heads": 4}},
            "Qwen3NextForCausalLM",
        ),
        ({"layers": "(mamba moe) x2"}, "JambaForCausalLM"),
        ({"layers": "(mamba2 mlp) x2", "mlp": {"gated": True}}, "BambaForCausalLM"),
        ({"layers": "(cca/mlp) x2", "cca": {"heads": 4}}, "ZayaForCausalLM"),
    ],
)
def test_a_refusal_names_a_class_of_the_same_layers(model: dict, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        hf_config(run(model))


@pytest.mark.parametrize(
    "layers", ["(mamba/mlp) x3", "mamba/mlp attention/mlp", "(mamba/moe) x2", "mamba/mlp attention/moe mamba/mlp"]
)
def test_jamba_is_found_whichever_of_its_layers_there_are(layers: str) -> None:
    jamba = {"attention": ATTENTION, "mamba": {"inner_norms": True}, "moe": {"experts": 4, "hidden_size": 24}}
    mlp = {"gated": True, "activation": "silu", "hidden_size": 24}
    assert hf_config(run({"layers": layers, **jamba, "mlp": mlp}))[0].name == "jamba"
