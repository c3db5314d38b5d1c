"""Ministral there and back: the same logits as transformers' model, the same weights bit by bit. A mistake is
reported."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import MinistralConfig, MinistralForCausalLM

from megatron.checkpoint import CheckpointError, open_checkpoint
from megatron.checkpoint.hf.export import export, prove
from megatron.checkpoint.hf.importer import import_model

SIZES = {
    "hidden_size": 32,
    "head_dim": 8,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 24,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 5,
    "pad_token_id": None,
    "eos_token_id": None,
}

LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0}


def published(folder, **settings):
    torch.manual_seed(0)
    MinistralForCausalLM(MinistralConfig(**SIZES, **settings)).save_pretrained(folder)
    return folder


def test_there_and_back(tmp_path):
    theirs = published(tmp_path / "theirs")
    import_model(theirs, tmp_path / "ours", extensions=("my_lab",))
    checkpoint = open_checkpoint(tmp_path / "ours")
    assert prove(checkpoint, theirs, None).holds
    written = export(checkpoint, tmp_path / "again")
    assert written.model_type == "ministral" and prove(checkpoint, written.folder, None).holds
    one, two = (load_file(folder / "model.safetensors") for folder in (theirs, written.folder))
    assert one.keys() == two.keys() and all(one[name].equal(two[name]) for name in one)


def test_what_the_model_does_not_compute_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="rope_type='longrope' is not computed here"):
        import_model(published(tmp_path / "long", rope_parameters=LONG), tmp_path / "ours", extensions=("my_lab",))
