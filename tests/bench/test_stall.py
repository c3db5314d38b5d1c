"""bench/checkpoint/stall.py: what its shares are, and that a run's saves are taken apart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.checkpoint.stall import BEFORE, LOOK, MEET, PARTS, SAVE, WHOLE, summary
from bench.runner import run
from tests.paths import ROOT

TINY = """
model: {layers: "(attention/mlp) x2", hidden_size: 32, vocab_size: 64, attention: {heads: 2}}
training: {sequence_length: 16, micro_batch_size: 2, global_batch_size: 4, steps: 100}
data: {synthetic: copy}
tokenizer: {type: none}
launch: {device: cpu}
"""


def save(whole: float, look: float) -> dict[str, list[float]]:
    return {WHOLE: [whole, whole / 2], LOOK: [look, look]}


def test_the_slowest_rank_counts_and_the_first_save_does_not() -> None:
    one = {"saves": [save(9.0, 9.0), save(1.0, 0.5), save(3.0, 0.1), save(2.0, 0.2)], "at": [0.0, 10.0, 20.0, 30.0]}
    two = {"saves": [save(9.0, 9.0), save(2.0, 0.1), save(1.0, 0.2), save(1.0, 0.1)], "at": [0.0, 10.0, 20.0, 30.0]}
    found = summary([one, two])
    assert found["saves"] == 3 and found["parts"][WHOLE] == [2.0, 1.0]  # of 2, 3 and 2
    assert found["parts"][LOOK] == [0.2, 0.2] and found["parts"][BEFORE] == [0.0, 0.0]
    assert found["share"] == pytest.approx((1.0 + 3.0) / 20.0)  # of the first rank, from the second save to the last


@pytest.mark.tour
def test_a_run_is_taken_apart(tmp_path: Path) -> None:
    (tmp_path / "tiny.yml").write_text(TINY)
    command = [sys.executable, "-m", "bench", "stall", str(tmp_path / "tiny.yml"), "--every", "2"]
    done = subprocess.run([*command, "--saves", "3", "--json"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    clock = {part: found["parts"][part][0] for part in PARTS}
    assert found["saves"] == 3 and 0 < found["share"] < 1
    assert 0 < clock[SAVE] < clock[WHOLE] and 0 < clock[LOOK] < clock[WHOLE] and 0 < clock[MEET] < clock[WHOLE]


def test_too_few_saves_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("stall", ["a.yml", "--saves", "2"]) == 2
    assert "--saves at least 3" in capsys.readouterr().err
