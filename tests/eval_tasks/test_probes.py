"""Losses of single texts during a run equal a plain pass over the checkpoint, on layouts. Bad files are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megatron.checkpoint import open_checkpoint
from megatron.checkpoint.read.logical import compare_tensors
from megatron.config import load
from megatron.data.tokenizer import BytesTokenizer
from megatron.evaluation.arguments import before_training
from megatron.evaluation.probes import LARGEST, Probe, ProbeError, read_probes
from megatron.training.text import load_model
from tests.training.test_run import job
from tests.workers import run as on_ranks

EOD = 256
CONFIG = """
model: {layers: "(attention/mlp) x2", hidden_size: 16, vocab_size: 260, attention: {heads: 2}}
training: {steps: 4, sequence_length: 24, global_batch_size: 4, micro_batch_size: 2}
optimizer: {lr: 0.01}
tokenizer: {type: bytes}
data: {synthetic: copy}
checkpoint: {every: 2}
evaluation:
  at_end: false
  probes: [{name: facts, path: FOLDER/facts.jsonl}, {name: often, path: FOLDER/facts.jsonl, every: 3}]
logging: {console: quiet, curve: false}
"""
LINES = [
    {"text": "one and two"},
    {"context": "two and two are ", "continuation": "four"},
    {"context": "two and two are", "continuation": " five"},
]
EXPECTED = [  # tokens, and how many of the last count
    Probe((EOD, *b"one and two"), 11),
    Probe(tuple(b"two and two are four"), 5),
    Probe(tuple(b"two and two are five"), 5),
]


def probes(folder: Path, ranks: int, *overrides: str) -> list[dict]:
    lines = on_ranks(ranks, job, str(folder), ranks, "training.accumulation=null", *overrides)[0]
    return [line for line in lines if "probes" in line]


def test_each_examples_loss_on_layouts_and_training_is_the_same_without(tmp_path):
    (tmp_path / "facts.jsonl").write_text("\n".join(map(json.dumps, LINES)) + "\n\n")
    (tmp_path / "tiny.yml").write_text(CONFIG.replace("FOLDER", str(tmp_path)))
    assert read_probes(tmp_path / "facts.jsonl", BytesTokenizer(), 24) == EXPECTED
    found = probes(tmp_path, 1)
    assert [(line["step"], sorted(line["probes"])) for line in found] == [
        (0, ["often"]),
        (2, ["facts"]),
        (3, ["often"]),
        (4, ["facts"]),
    ]
    model, _ = load_model(tmp_path / "run" / "checkpoints" / "step_00000004", torch.device("cpu"))
    for probe, loss in zip(EXPECTED, found[-1]["probes"]["facts"]["examples"], strict=True):
        with torch.no_grad():
            logits = model.head.logits(model.stream(torch.tensor([probe.tokens[:-1]])))[0]
        each = F.cross_entropy(logits, torch.tensor(probe.tokens[1:]), reduction="none")
        assert loss == pytest.approx(float(each[-probe.scored :].double().sum()), rel=1e-5)
    assert found[-1]["probes"]["facts"]["loss"] == pytest.approx(sum(found[-1]["probes"]["facts"]["examples"]) / 21)
    other = probes(tmp_path, 2, f"run.dir={tmp_path}/pp2", "parallel.pipeline=2", "zero.stage=0")
    for ours, theirs in zip(other, found, strict=True):
        for name, values in ours["probes"].items():
            assert values["examples"] == pytest.approx(theirs["probes"][name]["examples"], rel=1e-4)
    assert not probes(tmp_path, 1, f"run.dir={tmp_path}/without", "evaluation.probes=[]")
    both = [open_checkpoint(tmp_path / run / "checkpoints" / "step_00000004") for run in ("run", "without")]
    assert all(each.equal for each in compare_tensors(*both))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must have at least one example"),
        ("{", "facts.jsonl:1 must be a JSON object"),
        ('{"text": "a"}\n["a"]', 'facts.jsonl:2 must have "text", or "context" and "continuation"'),
        ('{"context": "a"}', 'must have "text", or "context" and "continuation"'),
        ('{"text": 1}', "must be strings"),
        ('{"text": ""}', "must have a token to predict"),
        ('{"context": "", "continuation": "a"}', "must have a token to predict, and one before it"),
        (json.dumps({"text": "a" * 25}), "has 26 tokens. It must have at most 25"),
        ('{"text": "a"}\n' * (LARGEST + 1), f"must have at most {LARGEST} examples"),
        (None, "must be a file of JSON lines"),
    ],
)
def test_bad_files_are_refused_before_a_rank_starts(text, said, tmp_path):
    if text is not None:
        (tmp_path / "facts.jsonl").write_text(text)
    with pytest.raises(ProbeError, match="facts.jsonl"):
        read_probes(tmp_path / "facts.jsonl", BytesTokenizer(), 24)
    (tmp_path / "tiny.yml").write_text(CONFIG.replace("FOLDER", str(tmp_path)))
    found = before_training((), load([str(tmp_path / "tiny.yml")], [], ranks=1).config)
    assert len(found) == 2 and all(said in line for line in found), found
    without = load([str(tmp_path / "tiny.yml")], ["tokenizer.type=none"], ranks=1).config
    assert "evaluation.probes needs the run's tokenizer" in before_training((), without)[0]
    (tmp_path / "tiny.yml").write_text(CONFIG.replace("FOLDER", str(tmp_path)).replace("often", "facts"))
    assert "names must differ" in before_training((), load([str(tmp_path / "tiny.yml")], [], ranks=1).config)[0]


def test_probes_fit_the_stage_in_which_they_are_first_scored(tmp_path):
    """One set is scored before the first update, the other one at checkpoints. The first is step 2's."""
    (tmp_path / "facts.jsonl").write_text(json.dumps({"text": "a" * 13}))
    (tmp_path / "tiny.yml").write_text(CONFIG.replace("FOLDER", str(tmp_path)))

    def found(until: int) -> list[str]:
        stage = f"training.sequence_schedule=[{{until: {until}, sequence_length: 12}}]"
        return before_training((), load([str(tmp_path / "tiny.yml")], [stage], ranks=1).config)

    assert len(found(1)) == 1 and "has 14 tokens. It must have at most 13" in found(1)[0]
    assert len(found(2)) == 2
