"""Layers that predict further tokens (DeepSeek-V3's) are left out of an import, and that is said."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from megatron.checkpoint import open_checkpoint
from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.hf.importer import import_model
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
    assert "left out: 2 tensors of layers that predict further tokens, such as model.layers.3.eh_proj.weight" in said
    names = set(open_checkpoint(tmp_path / "ours").tensors)
    assert "layers.2.moe.router.correction" in names and not any(name.startswith("layers.3.") for name in names)


def test_other_models_have_none(tmp_path):
    saved(hf.LlamaConfig(**LLAMA_LIKE), tmp_path / "theirs", **{"model.layers.2.eh_proj.weight": torch.ones(2, 2)})
    with pytest.raises(CheckpointError, match="left over: model.layers.2.eh_proj.weight"):
        import_model(tmp_path / "theirs", tmp_path / "ours")
