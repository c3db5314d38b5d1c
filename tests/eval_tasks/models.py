"""Small models with a tokenizer, as checkpoints and as the folders that transformers opens."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron.checkpoint import Fragment, Meta, save
from megatron.checkpoint.format.fragment import MASTER
from megatron.config import to_yaml
from megatron.config.resolution import combine
from megatron.config.source.layers import ConfigSource
from megatron.model.stack import build_model
from tests.model.parity import randomise, stored

TEXT = "the sum of a and b is c. Return the value of the name, or None if there is no such name in the list.\n" * 20
SIZE, LENGTH = 300, 64
KINDS = {
    "gpt_neox": {
        "layers": "(attention/mlp) x2",
        "residual": {"form": "parallel"},
        "attention": {"heads": 4, "rotary": {"fraction": 0.5}, "qkv_bias": True, "output_bias": True},
        "mlp": {"bias": True},
    },
    "mamba2": {
        "layers": "mamba2 x2",
        "norm": {"type": "rmsnorm"},
        "mamba2": {"head_dim": 8, "state_size": 8, "groups": 2},
    },
    "rwkv": {"layers": "(rwkv4/rwkv4_ffn) x2", "embedding": {"norm": True}, "rwkv4": {"init": "model"}},
    "mixtral": {
        "layers": "(attention/moe) x2",
        "norm": {"type": "rmsnorm"},
        "attention": {"heads": 4, "kv_heads": 2},
        "moe": {"experts": 4, "hidden_size": 24, "router": {"normalize": True}},
    },
    "bamba": {
        "layers": "(mamba2/mlp attention/mlp) x1",
        "norm": {"type": "rmsnorm"},
        "attention": {"heads": 4, "kv_heads": 2, "rotary": {"fraction": 0.5}},
        "mamba2": {"head_dim": 8, "state_size": 8, "groups": 2},
        "mlp": {"gated": True, "activation": "silu", "hidden_size": 40},
    },
    "rwkv7": {"layers": "(rwkv7/rwkv7_ffn) x2", "rwkv7": {"head_dim": 8}},  # transformers has no such model
}


def tokenizer_file(folder: Path) -> Path:
    """A byte-level BPE of a few hundred ids. The first one ends documents."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([TEXT], trainer)
    path = folder / "tokenizer.json"
    backend.save(str(path))
    return path


def settings(kind: str, folder: Path) -> dict:
    """The configuration of a model with one row in its vocabulary per id of the tokenizer."""
    return {
        "run": {"dir": str(folder)},
        "model": {"hidden_size": 32, "vocab_size": SIZE, **KINDS[kind]},
        "training": {"steps": 10, "sequence_length": LENGTH, "micro_batch_size": 4, "global_batch_size": 8},
        "data": {"synthetic": "copy"},
        "evaluation": {"truncate": True},
        "tokenizer": {"type": "huggingface", "path": str(folder / "tokenizer.json")},
    }


def write_checkpoint(kind: str, folder: Path, step: int = 7) -> Path:
    """A checkpoint of a randomised model in `folder`/checkpoints."""
    tokenizer_file(folder)
    resolved = combine([ConfigSource(settings(kind, folder))], ranks=1, check_inputs=False, name="small")
    model = build_model(resolved.config)
    randomise(model, step)
    fragments = [
        Fragment(parameter.logical, MASTER, 0, 1, 0, parameter.detach().flatten())
        for parameter in stored(model).values()
    ]
    meta = Meta(step=step, config=to_yaml(resolved), data={"tokens": step})
    return save(folder / "checkpoints", step, fragments, meta)
