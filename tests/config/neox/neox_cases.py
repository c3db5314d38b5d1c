"""Flat documents and an independent parameter count for the tests of the GPT-NeoX reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from megatron.config.neox import Translation, translate
from megatron.config.source.layers import ConfigSource, Origin

FIXTURES = Path(__file__).parent
TOKENIZER_SIZE = 50277  # the NeoX-20B and Pythia tokenizer

BASE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "train_micro_batch_size_per_gpu": 2,
    "train_iters": 100,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
}


def document(path: str, values: dict[str, Any], lines: dict[str, int] | None = None, override: bool = False):
    """A flat file, or an argument of this text, with the lines of some of its keys."""
    places = {(name,): Origin("file", file=path, line=line) for name, line in (lines or {}).items()}
    whole = Origin("argument", text=path) if override else Origin("file", file=path, line=1)
    return ConfigSource(values, places, whole)


def flat(**changes: Any) -> Translation:
    """The translation of a small complete file with `changes`. A change to None removes the key."""
    values = {name: value for name, value in (BASE | changes).items() if value is not None}
    return translate([document("small.yml", values, {name: line for line, name in enumerate(values, 1)})])


def fixture(*names: str) -> Translation:
    """The translation of files under tests/config/neox."""
    documents = []
    for name in names:
        text = (FIXTURES / name).read_text()
        lines = {
            line.split('"')[1]: number for number, line in enumerate(text.splitlines(), 1) if line.startswith('  "')
        }
        documents.append(document(name, yaml.safe_load(text), lines))
    return translate(documents)


def at(translation: Translation, key: str) -> Any:
    """The native value at a dotted key. KeyError if it is not set."""
    value: Any = translation.values
    for part in key.split("."):
        value = value[part]
    return value


def problem_of(translation: Translation, key: str):
    """The only problem of a translation, which must be about `key`."""
    assert [problem.key for problem in translation.problems] == [key], translation.problems
    return translation.problems[0]


def no_effect(translation: Translation) -> str:
    """The summary line of keys without effect ("" if there is none)."""
    lines = [note for note in translation.notes if note.startswith("GPT-NeoX keys without effect")]
    assert len(lines) <= 1
    return lines[0] if lines else ""


def noted(translation: Translation, *words: str) -> bool:
    """Whether one note has all the words."""
    return any(all(word in note for word in words) for note in translation.notes)


def parameters(translation: Translation, tokenizer_size: int) -> int:
    """Parameters of the dense model that the native values describe, counted matrix by matrix."""
    model = translation.values["model"]
    layers, hidden = int(model["layers"].rsplit("x", 1)[1]), model["hidden_size"]
    attention, mlp, norm = model["attention"], model["mlp"], model["norm"]
    heads = attention["heads"]
    head_dim = hidden // heads
    keys = attention.get("kv_heads", heads) * head_dim
    width = mlp["hidden_size"]
    norm_size = {"layernorm": 2 * hidden, "rmsnorm": hidden, "nonparametric": 0}[norm["type"]]

    block = hidden * hidden + 2 * hidden * keys + hidden * hidden
    block += (hidden + 2 * keys) * attention["qkv_bias"] + hidden * attention["output_bias"]
    inner = 2 if mlp["gated"] else 1
    block += inner * hidden * width + width * hidden + (inner * width + hidden) * mlp["bias"]
    block += norm_size * (1 if model["residual"].get("shared_norm") else 2)

    multiple = model["vocab_multiple"]
    vocabulary = -(-tokenizer_size // multiple) * multiple
    tables = 1 if model["embedding"]["tied"] else 2
    positions = model["embedding"].get("max_positions", 0)
    return layers * block + norm_size + (tables * vocabulary + positions) * hidden
