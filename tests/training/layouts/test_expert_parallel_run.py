"""A run with spread experts through the trainer: its lines, its samples, and its model in transformers' hands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import open_checkpoint
from megatron.checkpoint.hf.export import export, prove
from tests.training.test_run import job
from tests.workers import run

pytestmark = pytest.mark.layouts

CONFIG = """
model:
  layers: (attention/moe) x2
  hidden_size: 32
  vocab_size: 258
  norm: {type: rmsnorm}
  attention: {heads: 4, kv_heads: 2}
  moe: {experts: 4, hidden_size: 24, router: {normalize: true}}
training: {steps: 4, sequence_length: 16, global_batch_size: 8, micro_batch_size: 2}
optimizer: {lr: 0.01}
schedule: {warmup_steps: 2}
tokenizer: {type: bytes}
data: {synthetic: copy}
evaluation: {every: 2, samples: {every: 2, prompts: [abc], tokens: 4, temperature: 0}}
checkpoint: {every: 100}
logging: {console: quiet, curve: false}
"""


def test_the_same_run(tmp_path: Path) -> None:
    found = {}
    folded = ("parallel.tensor=2", "parallel.expert=2", "parallel.expert_tensor=1")
    for name, ranks, overrides in (("whole", 1, ()), ("spread", 2, ("parallel.expert=2",)), ("folded", 2, folded)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "tiny.yml").write_text(CONFIG)
        lines = run(ranks, job, str(folder), ranks, *overrides)[0]
        samples = [json.loads(line)["text"] for line in (folder / "run" / "samples.jsonl").read_text().splitlines()]
        found[name] = [line for line in lines if "loss" in line], samples
    for name in ("spread", "folded"):
        for line, same in zip(found["whole"][0], found[name][0], strict=True):
            assert line["loss"] == pytest.approx(same["loss"], rel=1e-5)
            assert line["grad_norm"] == pytest.approx(same["grad_norm"], rel=1e-4)
            assert {layer: each["load"] for layer, each in line["moe"].items()} == {
                layer: each["load"] for layer, each in same["moe"].items()
            }
        assert len(found[name][1]) == 2 and found[name][1] == found["whole"][1]
        checkpoint = open_checkpoint(next((tmp_path / name / "run/checkpoints").glob("step_*")))
        export(checkpoint, tmp_path / name / "mixtral")
        assert prove(checkpoint, tmp_path / name / "mixtral", torch.float32).holds
