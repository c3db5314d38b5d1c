"""GPT-NeoX's own command line starts the same run as the native one."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from megatron.config.source.arguments import ArgumentError
from megatron.launch.neox_style import translated
from tests.paths import ROOT


@pytest.mark.parametrize(
    "words, expected",
    [
        ("train.py -d configs a b", "train.py configs/a configs/b"),
        ("train.py --conf_dir configs a.yml b.json", "train.py configs/a.yml configs/b.json"),
        ("train.py --conf_dir=configs a model.x=1", "train.py configs/a model.x=1"),
        ("train.py a -d configs b", "train.py configs/a configs/b"),
        ("train.py -d configs /abs/a", "train.py /abs/a"),
        ("train.py a.yml -H hosts", "train.py a.yml launch.hostfile='hosts'"),
        ("train.py a --wandb_group g --wandb_team=t", "train.py a logging.wandb.group='g' logging.wandb.entity='t'"),
        ("train.py -d c a --own x -- -d y", "train.py c/a --own x -- -d y"),
        ("train.py a b=1 --own -x", "train.py a b=1 --own -x"),
        ("evaluate.py -d c a --eval_tasks piqa sciq", "evaluate.py c/a --tasks piqa,sciq"),
        ("evaluate.py --eval_tasks piqa sciq -d c a x=1", "evaluate.py c/a x=1 --tasks piqa,sciq"),
        ("evaluate.py a --eval_tasks piqa sciq x=1 --limit 9", "evaluate.py a x=1 --limit 9 --tasks piqa,sciq"),
        ("evaluate.py a --eval_tasks=piqa --iteration 500", "evaluate.py a --tasks piqa --checkpoint 500"),
        ("evaluate.py a --eval_tasks piqa -- -d y", "evaluate.py a --tasks piqa -- -d y"),
    ],
)
def test_translation(words, expected):
    assert translated(words.split()) == expected.split()


@pytest.mark.parametrize(
    "words, says",
    [
        ("generate.py -d configs a", "takes a run's directory or a checkpoint"),
        ("generate.py a.yml", "takes a run's directory or a checkpoint"),
        ("train.py a --autotuning tune", "is not available here"),
        ("train.py a --iteration=3", "checkpoint.resume"),
        ("train.py a --eval_tasks piqa", "--tasks NAME"),
        ("evaluate.py a --eval_tasks -d c", "--eval_tasks needs a value"),
        ("train.py a -d", "-d needs a value"),
    ],
)
def test_what_there_is_no_counterpart_of(words, says):
    with pytest.raises(ArgumentError, match=says):
        translated(words.split())


def test_eval_is_evaluate(tmp_path, monkeypatch):
    """GPT-NeoX's eval.py: evaluate.py next to it or the project's, unless the user has a script of that name."""
    monkeypatch.chdir(tmp_path)
    words = ["a.yml", "--eval_tasks", "piqa", "sciq", "--eval_results_prefix", "out/x"]
    script, *others, output = translated(["eval.py", *words])
    assert (script, others) == (str(ROOT / "evaluate.py"), ["a.yml", "--tasks", "piqa,sciq", "--output"])
    assert re.fullmatch(r"out/x_eval_results(_|-|\d)+\.json", output)
    (tmp_path / "evaluate.py").touch()
    assert translated(["eval.py", "a.yml"]) == ["evaluate.py", "a.yml"]
    (tmp_path / "eval.py").touch()
    assert translated(["eval.py", "a.yml"]) == ["eval.py", "a.yml"]


def deepy(folder, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "deepy.py"), *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.tour
def test_the_command(tmp_path):
    """With the folder before or after the script. Mistakes end with status 2 and a fix."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "tiny.yml").write_text(f"extends: {ROOT / 'configs' / 'test' / 'tiny_neox.yml'}\n")
    (tmp_path / "conf" / "more.yml").write_text("training: {steps: 77}\n")
    script = str(ROOT / "train.py")
    plain = deepy(tmp_path, "--dry-run", "--ranks", "1", script, "conf/tiny.yml", "conf/more.yml")
    assert plain.returncode == 0, plain.stderr
    for words in (["-d", "conf", script, "tiny", "more"], [script, "-d", "conf", "tiny", "more.yml"]):
        done = deepy(tmp_path, "--dry-run", "--ranks", "1", *words)
        assert done.returncode == 0, done.stderr
        assert done.stdout == plain.stdout
    done = deepy(tmp_path, "eval.py", "-d", "conf", "tiny", "tokenizer.type=bytes", "model.vocab_size=257")
    assert done.returncode == 2 and "no task is named" in done.stderr and "Traceback" not in done.stderr
    done = deepy(tmp_path, script, "-d", "conf", "tniy")
    assert done.returncode == 2 and "conf/tniy" in done.stderr
