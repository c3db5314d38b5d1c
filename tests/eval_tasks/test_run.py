"""Tasks inside a run and on its checkpoints, by the commands that people type."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron.checkpoint import open_checkpoint
from megatron.checkpoint.read.logical import compare_tensors
from megatron.config.sections.output import TaskOptions
from megatron.evaluation.arguments import parse
from megatron.evaluation.select import Request
from megatron.launch.command_line import main
from tests.paths import ROOT
from tests.training.test_run import job
from tests.workers import run as on_ranks

MODEL = ROOT / "configs" / "test" / "tiny_neox.yml"
TASKS = [
    {"name": "deepy_induction", "every": 6, "limit": 4},
    {"name": "deepy_copy", "limit": 2},
    {"name": "deepy_cloze", "every": 0},  # evaluate.py's alone
]


def deepy(*words: object, folder: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "deepy.py", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)


def configuration(folder: Path, **sections) -> Path:
    values = {
        "extends": str(MODEL),
        "model": {"vocab_size": 257},
        "tokenizer": {"type": "bytes"},
        "training": {"steps": 12},
        "checkpoint": {"every": 6},
        **sections,
        "evaluation": {"truncate": True, **sections.get("evaluation", {})},  # the model reads a few words
    }
    file = folder / "run.yml"
    file.write_text(yaml.safe_dump(values))
    return file


def lines(run: Path, *names: str) -> list[dict]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: record[name] for name in names} for record in records if all(name in record for name in names)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """The same run with tasks, as people start it, and without, on two data parallel ranks."""
    folder = tmp_path_factory.mktemp("with")
    file = configuration(folder, evaluation={"tasks": TASKS}, run={"dir": str(folder / "run")})
    done = deepy("--ranks", 2, ROOT / "train.py", file, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    other = tmp_path_factory.mktemp("without")
    configuration(other, run={"dir": str(other / "run")}).rename(other / "tiny.yml")
    on_ranks(2, job, str(other), 2)
    return {"with": folder / "run", "without": other / "run"}


@pytest.mark.tour
def test_training_is_bitwise_the_same_with_tasks(runs):
    numbers = [lines(run, "step", "loss", "grad_norm", "batch_hash") for run in runs.values()]
    assert len(numbers[0]) == 12 and numbers[0] == numbers[1]
    last = [open_checkpoint(run / "checkpoints" / "step_00000012") for run in runs.values()]
    differences = compare_tensors(*last)
    assert differences and all(each.equal for each in differences)


@pytest.mark.tour
def test_results_are_in_metrics_and_ledger(runs):
    found = lines(runs["with"], "step", "tasks")
    assert [record["step"] for record in found] == [6, 12]
    assert list(found[0]["tasks"]) == ["deepy_induction"]
    assert set(found[1]["tasks"]) == {"deepy_induction", "deepy_copy"}
    ledger = [json.loads(line) for line in (runs["with"] / "ledger.jsonl").read_text().splitlines()]
    entries = [entry for entry in ledger if entry["event"] == "tasks"]
    hashes = {record["step"] + 1: record["batch_hash"] for record in lines(runs["with"], "step", "loss", "batch_hash")}
    assert [entry["batch_hash"] for entry in entries] == [hashes[6], hashes[12]]


@pytest.mark.tour
def test_every_checkpoint_on_another_layout_scores_what_the_run_did(runs):
    run = runs["with"]
    words = (ROOT / "evaluate.py", run.parent / "run.yml", "parallel.pipeline=2", "zero.stage=0")
    options = ("--tasks", "deepy_induction", "--limit", "4", "--all-checkpoints")
    before = (run / "metrics.jsonl").read_bytes(), (run / "ledger.jsonl").read_bytes()
    done = deepy("--ranks", 2, *words, *options, folder=run.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    in_run = {record["step"]: record["tasks"] for record in lines(run, "step", "tasks")}
    for step in (6, 12):
        results = json.loads((run / "evaluations" / f"step_{step:08d}.json").read_text())
        for metric in ("acc", "acc_norm"):
            assert results["results"]["deepy_induction"][f"{metric},none"] == in_run[step]["deepy_induction"][metric]
    assert (run / "evaluations" / "curves.png").stat().st_size > 1000
    assert before == ((run / "metrics.jsonl").read_bytes(), (run / "ledger.jsonl").read_bytes())
    neox = ("--eval_tasks", *options[1:])  # GPT-NeoX's words for the same
    again = deepy("--ranks", 1, ROOT / "eval.py", run.parent / "run.yml", *neox, folder=run.parent)
    assert again.returncode == 0 and "2 of 2 checkpoints have their results already" in again.stdout + again.stderr


def test_data_that_are_missing_are_said_before_the_first_step(tmp_path):
    """Of a task that is due after the last step, given by its file."""
    task = {
        "task": "mine",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": str(tmp_path / "nowhere.jsonl")},
        "output_type": "multiple_choice",
        "test_split": "train",
        "doc_to_text": "{{text}}",
        "doc_to_target": 0,
        "doc_to_choice": ["a", "b"],
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(task))
    tasks = [{"name": str(tmp_path / "mine.yaml")}]
    configuration(tmp_path, evaluation={"tasks": tasks}, run={"dir": str(tmp_path / "run")}).rename(
        tmp_path / "tiny.yml"
    )
    with pytest.raises(RuntimeError, match="StartError: evaluation.tasks: the data of .*mine.yaml cannot be loaded"):
        on_ranks(2, job, str(tmp_path), 2)
    assert (
        not (tmp_path / "run" / "metrics.jsonl").exists() or "loss" not in (tmp_path / "run/metrics.jsonl").read_text()
    )


def test_tasks_of_the_configuration():
    """Tasks that evaluate.py runs without --tasks. The command line's options count."""
    tasks = [TaskOptions(**each) for each in TASKS]
    given = parse([], tasks).requests
    assert given == (Request("deepy_induction", None, 4), Request("deepy_copy", None, 2), Request("deepy_cloze"))
    assert {each.limit for each in parse(["--limit", "1"], tasks).requests} == {1}
    assert parse(["--tasks", "piqa"], tasks).requests == (Request("piqa"),)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tasks", "deepy_indction"), "Did you mean deepy_induction"),
        (("--tasks", "zzz"), "the harness's tasks. The project's own are deepy_"),
        (("--tasks", "deepy_copy", "--limit", "0"), "it must be a share below 1 or a number of documents"),
        (("--tasks", "deepy_copy", "--checkpoint", "nowhere"), "--checkpoint nowhere does not exist"),
        (("--tasks", "deepy_copy", "tokenizer.type=none"), None),
        ((), "--tasks"),
    ],
)
def test_mistakes_are_found_before_a_rank_starts(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = configuration(tmp_path, run={"dir": str(tmp_path / "run")})
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert main([str(ROOT / "evaluate.py"), str(file), *words]) == 2
    if said:
        assert said in capsys.readouterr().err
    assert not (tmp_path / "run" / "logs").exists()
