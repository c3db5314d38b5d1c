"""The benchmark of long sequences: ranks that share a sequence agree with one, and a difference is an error."""

from __future__ import annotations

import json

import pytest

from bench.runner import run
from bench.step import long_context
from bench.step.long_context import Row, table
from tests.paths import ROOT


def row(ranks: int, loss: float, sent: int = 0) -> Row:
    return Row(64, ranks, 3 << 20, 1 << 20, sent, loss, 2.0)


def test_a_table_by_hand():
    lines = table([row(1, 4.0), row(2, 4.0004, sent=1 << 19)]).splitlines()
    assert lines[2] == "| 64 | 1 | 4.000000 | 2.000000 |  | 3.0 | 1.0 | – |"
    assert lines[3] == "| 64 | 2 | 4.000400 | 2.000000 | 1.0e-04 | 3.0 | 1.0 | 0.5 |"


@pytest.mark.parametrize(("second", "status"), [(4.00001, 0), (4.001, 1), (float("nan"), 1)])
def test_what_differs_is_an_error(monkeypatch, capsys, second, status):
    losses = {1: 4.0, 2: second}
    monkeypatch.setattr(long_context, "one_run", lambda sources, length, ranks, folded: row(ranks, losses[ranks]))
    assert run("long_context", ["a.yml", "--lengths", "64", "--context", "1", "2"]) == status


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--folded"]])
def test_real_runs(more, capfd):
    """Of a hybrid, whose attention has a window in one layer."""
    words = [str(ROOT / "configs/test/tiny_bamba.yml"), "schedule.warmup_steps=0"]
    assert run("long_context", [*words, "--lengths", "64", "--context", "1", "2", *more]) == 0
    one, two = capfd.readouterr().out.splitlines()[-2:]
    assert one.startswith("| 64 | 1 | ") and one.endswith("| – |")
    assert two.startswith("| 64 | 2 | ") and float(two.split("|")[-2]) > 0


# Each way in which a hybrid sees the tokens of other ranks: states, convolutions, attention with a window and without.
HYBRID = """
model:
  layers: mamba2/mlp attention@local/mlp mamba2/mlp attention/mlp
  hidden_size: 64
  vocab_size: 256
  attention: {heads: 4, kv_heads: 2}
  variants: {local: {window: 4096}}
  mlp: {hidden_size: 256}
training: {activation_checkpointing: {mode: full}, seed: 1}
data: {synthetic: copy}
optimizer: {type: adamw, lr: 1.0e-3}
schedule: {type: constant}
launch: {device: cpu}
"""


@pytest.mark.slow
def test_131_072_tokens_on_four_ranks_under_4_gib_are_those_of_one(tmp_path):
    """A step of a hybrid. The measurement compares loss and gradient norm."""
    (tmp_path / "hybrid.yml").write_text(HYBRID)
    words = [str(tmp_path / "hybrid.yml"), "--lengths", "131072", "--context", "1", "4"]
    assert run("long_context", [*words, "--json", str(tmp_path / "rows.json")]) == 0
    one, four = json.loads((tmp_path / "rows.json").read_text())
    assert (one["ranks"], four["ranks"]) == (1, 4) and four["sent"] > 0
    assert four["peak"] < 4 << 30 and four["step"] < one["step"]
