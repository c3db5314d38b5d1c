"""A tiny run, tools by name and stored values, for tests that exchange checkpoints with DeepSpeed."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch

from megatron.checkpoint import open_checkpoint
from megatron.checkpoint.format.fragment import FragmentSpec
from tests.paths import ROOT

TINY = """
model: {layers: "(attention/mlp) x2", hidden_size: 32, vocab_size: 64, attention: {heads: 4, kv_heads: 2},
        mlp: {gated: true, bias: true}}
training: {steps: 3, sequence_length: 16, micro_batch_size: 2, global_batch_size: 4}
optimizer: {lr: 1e-2}
data: {synthetic: copy}
tokenizer: {type: none}
launch: {device: cpu}
zero: {stage: 1}
"""


def tool(name: str):
    spec = spec_from_file_location(f"universal_{name}", ROOT / "tools" / "checkpoint" / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def values_of(path: Path) -> dict[tuple[str, str], torch.Tensor]:
    checkpoint = open_checkpoint(path, verify="checksums")
    return {
        (name, state): checkpoint.read(FragmentSpec.whole(checkpoint.tensors[name], state)).data.view(
            checkpoint.tensors[name].shape
        )
        for name, state in checkpoint.stored
    }
