"""tools/communication.py: what a run sent beside what was predicted, and a prediction without a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.parallel.traffic import Tally
from tests.training.test_run import job
from tests.workers import run
from tools.communication import main, show

CONFIG = """
model: {layers: (attention/mlp) x2, hidden_size: 32, vocab_size: 258, attention: {heads: 4}}
training: {steps: 2, sequence_length: 16, global_batch_size: 4, micro_batch_size: 2}
optimizer: {lr: 0.01}
schedule: {warmup_steps: 1}
tokenizer: {type: bytes}
data: {synthetic: copy}
checkpoint: {at_end: false}
evaluation: {at_end: false}
parallel: {tensor: 2}
logging: {console: quiet, curve: false, communication: counts}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tool")
    (folder / "tiny.yml").write_text(CONFIG)
    run(2, job, str(folder), 2)
    return folder


def test_a_run_sends_what_was_predicted(folder, capsys):
    picture = folder / "picture.png"
    assert main([str(folder / "run"), "--json", "--output", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] is True and found["step"] == 1 and found["ranks"] == [0, 1]
    assert picture.read_bytes().startswith(b"\x89PNG")
    # 2 micro-batches, 2 ranks, 4 layers and the embedding: sums of 2 x 16 x 32 floats
    forward = [call for call in found["calls"] if call["phase"] == "forward"]
    assert sum(call["bytes"] for call in forward) == 2 * 2 * (5 * 2 * 16 * 32 * 4 + 3 * 32 * 4)
    for call in found["calls"]:
        assert (call["messages"], call["bytes"]) == (call["predicted_messages"], call["predicted_bytes"])


def test_a_configuration_is_predicted_without_a_run(folder, capsys):
    assert main([str(folder / "run"), "--json", "--layers"]) == 0
    counted = json.loads(capsys.readouterr().out)["calls"]
    assert main([str(folder / "tiny.yml"), "--ranks", "2", "--json", "--layers"]) == 0
    predicted = json.loads(capsys.readouterr().out)["calls"]
    names = ("phase", "layer", "group", "operation", "dtype")
    assert [[call[name] for name in (*names, "bytes")] for call in counted] == [
        [call[name] for name in (*names, "predicted_bytes")] for call in predicted
    ]


def test_a_step_that_differs_is_told(folder, capsys):
    file = folder / "run" / "communication" / "rank_0.jsonl"
    text = file.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    lines[0]["predicted"][0][-1] += 8
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    try:
        assert main([str(folder / "run")]) == 0
    finally:
        file.write_text(text)
    printed = capsys.readouterr().out
    assert "differs by -8 bytes" in printed and "counted and predicted differ" in printed


def test_looks_within_slow_steps_are_no_difference():
    """How many there are depends on the time."""
    row = ["exchange", "", "world", 4, "all_reduce", "fp64", 1, 112]
    look = ["look", "", "world", 4, "all_reduce", "fp64", 3, 192]
    predicted = Tally.of_rows([row])
    assert "are equal" in show({}, Tally.of_rows([row, look]), predicted, ("phase", "group"))
    assert "differ" in show({}, Tally.of_rows([look]), predicted, ("phase", "group"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["{run}", "--rank", "7"], "not of 7"),
        (["{run}", "--step", "9"], "no account of step 9"),
        (["{folder}"], "logging.communication=counts"),
        (["{folder}/tiny.yml", "--ranks", "2", "--rank", "2"], "from 0 to 1"),
        (["{folder}/tiny.yml", "--ranks", "2", "zero.stage=3", "parallel.tensor=1"], "no formula for ZeRO 3"),
    ],
)
def test_what_cannot_be_shown_is_said(folder, capsys, words, told):
    words = [word.format(run=folder / "run", folder=folder) for word in words]
    assert main(words) == 2
    assert told in capsys.readouterr().err
