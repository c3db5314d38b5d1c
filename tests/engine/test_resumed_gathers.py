"""A run that is resumed at ZeRO 3, where DeepSpeed follows the order in which weights are read."""

from pathlib import Path
from typing import Any

import pytest

from megatron.config import load
from megatron.testing.runs import run_on_this_rank
from tests.workers import run

MODEL = """
model:
  layers: "(attention/moe) x2"
  hidden_size: 32
  vocab_size: 99
  attention: {heads: 4}
  moe: {experts: 4, hidden_size: 16, bias: true}
training: {steps: 4, sequence_length: 12, micro_batch_size: 2, global_batch_size: 8}
optimizer: {lr: 0.01}
data: {synthetic: copy}
tokenizer: {type: none}
checkpoint: {every: 2}
evaluation: {at_end: false}
logging: {console: quiet, curve: false}
"""
ZERO_3 = ("zero.stage=3", "zero.prefetch_size=0", "training.activation_checkpointing.mode=full")


def job(folder: str, *overrides: str) -> list[dict[str, Any]]:
    return run_on_this_rank(load([f"{folder}/model.yml"], [f"run.dir={folder}/run", *overrides], ranks=1), 1)


def test_a_run_of_another_stage_is_resumed(tmp_path: Path) -> None:
    """The block reads biases of its experts. DeepSpeed notes so in the first pass only where it has to gather them."""
    (tmp_path / "model.yml").write_text(MODEL)
    ((*_, third, last),) = run(1, job, str(tmp_path), f"run.dir={tmp_path}/plain")
    run(1, job, str(tmp_path), "training.stop_at_step=2")
    ((*_, resumed_third, resumed_last),) = run(1, job, str(tmp_path), *ZERO_3)
    losses = [each["loss"] for each in (resumed_third, resumed_last)]
    assert losses == pytest.approx([third["loss"], last["loss"]], rel=1e-5)
