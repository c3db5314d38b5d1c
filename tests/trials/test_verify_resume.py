"""tools/verify_resume.py on a run that resumes as it should, and on one whose hook has a state that is not saved."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.config import load
from megatron.training.hook import Hook
from megatron.training.trainer import Trainer
from megatron.trials.resume import Equality, Verdict, other_layout
from tests.paths import ROOT
from tools.verify_resume import main

TINY = """
model: {layers: "(attention/mlp) x2", hidden_size: 32, vocab_size: 64, dropout: 0.1, attention: {heads: 2}}
training: {sequence_length: 16, micro_batch_size: 2, global_batch_size: 4, steps: 100}
optimizer: {lr: 1e-2}
data: {synthetic: copy}
tokenizer: {type: none}
evaluation: {at_end: false}
logging: {console: quiet, curve: false}
launch: {device: cpu}
"""


class Forgetful(Hook):
    """Counts the steps of its own process and adds to a weight by that: what no checkpoint knows."""

    def __init__(self) -> None:
        self.steps = 0

    def before_step(self, trainer: Trainer, step: int) -> None:
        self.steps += 1
        for fragment in trainer.engine.state.masters():
            fragment.data.view(-1)[0] += 1e-3 * self.steps


def verify(folder: Path, *words: str) -> tuple[int, dict, str]:
    (folder / "tiny.yml").write_text(TINY)
    command = [sys.executable, str(ROOT / "tools" / "verify_resume.py"), str(folder / "tiny.yml"), *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


@pytest.mark.slow
def test_a_run_that_resumes_as_it_should(tmp_path: Path) -> None:
    status, found, said = verify(tmp_path, "--ranks", "2", "--steps", "12", "--folder", str(tmp_path / "runs"))
    assert status == 0 and found["equal"], said
    same, other = found["resumptions"]
    assert same["bound"] == 0.0 and same["resumed"] == 6 and same["found"]["losses"] == 12 and not same["found"]["loss"]
    assert same["found"]["tensors"] > 50 and not same["found"]["different"]
    assert "parallel.tensor=2" in other["where"] and 0 < other["found"]["loss"] < other["bound"] < 1e-4


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("", "must begin with a number of ranks"),
        (" ", "must begin with a number of ranks"),
        ("0 zero.stage=1", "must begin with a number of ranks"),
        ("²", "must begin with a number of ranks"),
        ("2 parallel.tensr=2", "did you mean parallel.tensor?"),
        ("3", "training.global_batch_size"),
    ],
)
def test_another_layout_that_cannot_be_is_refused_before_anything_is_trained(
    tmp_path: Path, other: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny.yml").write_text(TINY)
    try:
        status = main([str(tmp_path / "tiny.yml"), "--other", other, "--folder", str(tmp_path / "runs")])
    except SystemExit as end:
        status = int(end.code or 0)
    assert status == 2 and said in capsys.readouterr().err and not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_run_that_forgets_something(tmp_path: Path) -> None:
    hooks = "hooks=['tests.trials.test_verify_resume:Forgetful']"
    status, found, said = verify(tmp_path, hooks, "--steps", "8", "--other", "none", "--folder", str(tmp_path / "runs"))
    assert status == 1, said
    (same,) = found["resumptions"]
    assert not same["equal"] and same["found"]["different"] and same["found"]["loss"] > 0


def test_what_a_verdict_needs() -> None:
    equal = Equality(10, (), 5, 0.0, 0.0)
    assert Verdict("here", 3, equal, 0.0).good and Verdict("here", 3, equal, 1e-4).good
    rounded = Equality(10, ("a (master)",), 5, 5e-5, 1e-6)
    assert not Verdict("here", 3, rounded, 0.0).good and Verdict("there", 3, rounded, 1e-4).good
    assert not Verdict("there", 3, Equality(10, ("a (master)",), 5, 2e-4, 1e-6), 1e-4).good
    assert not Verdict("there", 3, Equality(10, (), 5, float("nan"), 0.0), 1e-4).good
    assert not Verdict("here", 3, Equality(0, (), 0, 0.0, 0.0), 0.0).good, "nothing compared proves nothing"


def test_another_layout_is_found(tmp_path: Path) -> None:
    file = tmp_path / "tiny.yml"
    file.write_text(TINY)
    for words, ranks, expected in (([], 2, "parallel.tensor=2"), (["parallel.tensor=2"], 2, "parallel.pipeline=2")):
        config = load([str(file)], words, ranks=ranks).config
        found = other_layout([str(file), *words], config, ranks)
        assert found is not None and expected in found.overrides and found.ranks == 2
