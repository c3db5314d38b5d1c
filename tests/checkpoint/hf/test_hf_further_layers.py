"""Layers that predict further tokens (DeepSeek-V3's): omitted from an import, which is said, or kept if asked for."""

from __future__ import annotations

import json

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from megatron.checkpoint import open_checkpoint
from megatron.checkpoint.format.errors import CheckpointError
from megatron.checkpoint.hf.export import export, prove, tensor_reader
from megatron.checkpoint.hf.importer import import_model
from tests.checkpoint.hf.test_hf_tools import checkpoint_of
from tests.model.parity import LLAMA_LIKE
from tests.model.test_parity import CASES


def saved(config: hf.PreTrainedConfig, folder, **more: torch.Tensor) -> None:
    """A random model of theirs with further tensors in its file."""
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file({**load_file(file), **more}, file, {"format": "pt"})


def test_further_layers_are_left_out(tmp_path):
    further = {"model.layers.3.eh_proj.weight": torch.ones(2, 2), "model.layers.4.enorm.weight": torch.ones(2)}
    saved(CASES["deepseek_v3"], tmp_path / "theirs", **further)
    said: list[str] = []
    import_model(tmp_path / "theirs", tmp_path / "ours", progress=said.append)
    assert "skipped: 2 tensors of layers that predict further tokens, such as model.layers.3.eh_proj.weight" in said
    names = set(open_checkpoint(tmp_path / "ours").tensors)
    assert "layers.2.moe.router.correction" in names and not any(name.startswith("layers.3.") for name in names)


def with_module(folder, **wrong: torch.Tensor) -> dict[str, torch.Tensor]:
    """A model of theirs whose fourth layer predicts further tokens, in the form of DeepSeek's files. Its tensors."""
    config = CASES["deepseek_v3"]
    config = type(config)(**{**config.to_dict(), "num_nextn_predict_layers": 1})
    torch.manual_seed(3)
    longer = hf.AutoModelForCausalLM.from_config(type(config)(**{**config.to_dict(), "num_hidden_layers": 4}))
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    last = "model.layers.3."
    folder_tensors = load_file(folder / "model.safetensors")
    longer.save_pretrained(folder / "longer")
    tensors = {k: v for k, v in load_file(folder / "longer" / "model.safetensors").items() if k.startswith(last)}
    H = config.hidden_size
    tensors |= {f"{last}{name}.weight": torch.rand(H) for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors |= {
        f"{last}eh_proj.weight": torch.rand(H, 2 * H),
        f"{last}embed_tokens.weight": folder_tensors["model.embed_tokens.weight"].clone(),
        f"{last}shared_head.head.weight": folder_tensors["lm_head.weight"].clone(),
    }
    whole = {**folder_tensors, **tensors, **wrong}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    return whole


def test_further_layers_are_kept(tmp_path):
    """They come back from an export bit for bit, their copies of embedding and head too."""
    whole = with_module(tmp_path / "theirs")
    resolved = import_model(tmp_path / "theirs", tmp_path / "ours", further=True)
    assert resolved.config.model.multi_token_prediction.depth == 1
    checkpoint = open_checkpoint(tmp_path / "ours")
    read = tensor_reader(checkpoint, None)
    assert read("layers.3.projection.weight").equal(whole["model.layers.3.eh_proj.weight"])
    assert read("layers.3.hidden_norm.weight").equal(whole["model.layers.3.hnorm.weight"])
    found = export(checkpoint, tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == whole.keys() and all(again[name].equal(value) for name, value in whole.items())
    assert json.loads((tmp_path / "again" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert not any("skipped" in note for note in found.notes)
    assert prove(checkpoint, tmp_path / "again", None).holds


def test_copies_that_differ_are_refused(tmp_path):
    with_module(tmp_path / "theirs", **{"model.layers.3.embed_tokens.weight": torch.ones(61, 32)})
    with pytest.raises(CheckpointError, match=r"layers.3.embed_tokens.weight and model.embed_tokens.weight are one"):
        import_model(tmp_path / "theirs", tmp_path / "ours", further=True)


def test_models_without_such_layers_have_none_to_keep(tmp_path):
    hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**LLAMA_LIKE)).save_pretrained(tmp_path / "theirs")
    with pytest.raises(CheckpointError, match="no layers that predict further tokens"):
        import_model(tmp_path / "theirs", tmp_path / "ours", further=True)


def test_other_architectures_are_exported_without(tmp_path):
    """A Llama with a module is a Llama without it."""
    values = {
        **{"layers": "(attention/mlp) x2", "hidden_size": 16, "vocab_size": 31, "norm": {"type": "rmsnorm"}},
        **{"attention": {"heads": 2}, "mlp": {"gated": True, "activation": "silu", "hidden_size": 24}},
        "multi_token_prediction": {"depth": 2},
    }
    checkpoint, _ = checkpoint_of(tmp_path / "ours", values)
    found = export(checkpoint, tmp_path / "theirs")
    assert found.model_type == "llama"
    assert any("skipped: 22 tensors of modules that predict further tokens" in note for note in found.notes)
    assert prove(checkpoint, tmp_path / "theirs", None).holds


def test_other_models_have_none(tmp_path):
    saved(hf.LlamaConfig(**LLAMA_LIKE), tmp_path / "theirs", **{"model.layers.2.eh_proj.weight": torch.ones(2, 2)})
    with pytest.raises(CheckpointError, match="left over: model.layers.2.eh_proj.weight"):
        import_model(tmp_path / "theirs", tmp_path / "ours")
