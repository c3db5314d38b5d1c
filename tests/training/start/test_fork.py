"""Branches of a run: bitwise what one run with the branch's schedule would have been, on another layout too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron.config import load
from megatron.report.jsonl import read_lines
from tests.training.start.test_traced_run import CONFIG, corpora
from tests.training.test_run import TINY, job, tensors
from tests.workers import run as on_ranks
from tools.fork import main

TRUNK = "schedule.type=constant"


def train(folder: Path, text: str, *overrides: str, ranks: int = 1) -> list[dict]:
    folder.mkdir(exist_ok=True)
    (folder / "tiny.yml").write_text(text)
    return [line for line in on_ranks(ranks, job, str(folder), ranks, *overrides)[0] if "loss" in line]


def branch(folder: Path, at: int, steps: int, ranks: int = 1, *overrides: str) -> list[dict]:
    """The branch of folder/trunk/run, in folder/branch/run, trained to its end."""
    (folder / "branch").mkdir()
    words = ["--at", str(at), "--steps", str(steps), "--output", str(folder / "branch" / "run")]
    assert main([str(folder / "trunk" / "run"), *words]) == 0
    text = (folder / "branch" / "run" / "fork.yml").read_text()
    return train(folder / "branch", text, *overrides, ranks=ranks)


def events(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]


def test_a_branch_is_what_one_run_would_have_been(tmp_path):
    """Beyond the trunk's end, with dropout. The trunk's own checkpoints and files stay as they are."""
    train(tmp_path / "trunk", TINY, TRUNK)
    before = {path: path.read_bytes() for path in (tmp_path / "trunk").rglob("*") if path.suffix in (".yml", ".json")}
    found = branch(tmp_path, 4, 4)
    decay = ["schedule.type=wsd", "schedule.steps=8", "schedule.decay_steps=4", "training.steps=8"]
    whole = train(tmp_path / "whole", TINY, *decay)
    assert [line["step"] for line in found] == [4, 5, 6, 7]
    for key in ("loss", "lr", "grad_norm", "batch_hash", "tokens"):
        assert [line[key] for line in found] == [line[key] for line in whole[4:]]
    assert len({line["lr"] for line in found}) > 2
    ours, theirs = tensors(tmp_path / "branch", 8), tensors(tmp_path / "whole", 8)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert {path: path.read_bytes() for path in before} == before
    (told,) = [event for event in events(tmp_path / "trunk" / "run") if event["event"] == "fork"]
    first, *_, last = events(tmp_path / "branch" / "run")
    assert (told["step"], told["branch"]) == (4, str(tmp_path / "branch" / "run"))
    assert (first["event"], first["trunk"], last["event"]) == ("forked", str(tmp_path / "trunk" / "run"), "end")


def test_a_branch_reads_the_batches_of_its_trunk_and_goes_on_after_a_stop(tmp_path):
    """On texts that are read several times, whose order depends on the length of the run. Then on two ranks."""
    corpora(tmp_path)
    text = CONFIG.replace("FOLDER", str(tmp_path)).replace("steps: 6", "steps: 60")
    trunk = train(tmp_path / "trunk", text, TRUNK, "training.stop_at_step=9", "checkpoint.every=3")
    half = branch(tmp_path, 3, 4, 1, "training.stop_at_step=5")
    rest = train(tmp_path / "branch", (tmp_path / "branch" / "tiny.yml").read_text(), ranks=2)
    assert [line["step"] for line in half + rest] == [3, 4, 3, 4, 5, 6]  # metrics.jsonl has the whole branch
    hashes = {line["step"]: line["batch_hash"] for line in trunk}
    assert all(line["batch_hash"] == hashes[line["step"]] for line in rest)
    assert [line["event"] for line in events(tmp_path / "branch" / "run")][-1] in ("stop", "end")


def test_the_file_has_what_the_trunk_was_given(tmp_path):
    train(
        tmp_path / "trunk",
        TINY,
        TRUNK,
        "schedule.warmup_steps=null",
        "schedule.warmup_fraction=0.5",
        "run.notes=one",
        f"checkpoint.levels=[{{place: store, url: 'file://{tmp_path}/bucket', every: 2, keep: 1}}]",
    )
    main([str(tmp_path / "trunk" / "run"), "--at", "4", "--steps", "1", "--output", str(tmp_path / "b")])
    found = load([str(tmp_path / "b" / "fork.yml")], ranks=1)
    config = found.config
    assert not [each.rule for each in found.warnings if "keep the schedule's last rate" in each.rule]
    assert (config.run.name, config.run.dir, config.run.notes) == ("b", str(tmp_path / "b"), "")
    assert config.model.hidden_size == 32 and config.optimizer.lr == 1e-2 and config.checkpoint.resume == "auto"
    assert (config.schedule.warmup_steps, config.schedule.steps, config.schedule.decay_steps) == (3, 5, 1)
    assert (config.training.steps, config.training.stop_at_step) == (6, 5)
    # A branch never takes its trunk's copies for its own, nor overwrites them.
    assert not config.checkpoint.levels


@pytest.mark.parametrize(
    ("overrides", "words", "rule"),
    [
        ([TRUNK], ["--at", "3"], "there is no checkpoint of step 3"),
        ([TRUNK], ["--at", "2"], "is moving at step 2"),
        (["schedule.type=cosine"], ["--at", "4"], "schedule.type is 'cosine'"),
        (["schedule.type=wsd", "schedule.decay_steps=3"], ["--at", "4"], "is moving at step 4"),
    ],
)
def test_where_no_branch_can_begin(tmp_path, capsys, overrides, words, rule):
    train(tmp_path / "trunk", TINY, "training.stop_at_step=4", *overrides)
    before = list(read_lines(tmp_path / "trunk" / "run" / "ledger.jsonl"))
    assert main([str(tmp_path / "trunk" / "run"), *words, "--steps", "2", "--output", str(tmp_path / "b")]) == 2
    assert rule in capsys.readouterr().err and not list(tmp_path.glob("b*"))
    assert list(read_lines(tmp_path / "trunk" / "run" / "ledger.jsonl")) == before


def test_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "b").mkdir()
    train(tmp_path / "trunk", TINY, TRUNK)
    assert main([str(tmp_path / "trunk" / "run"), "--at", "4", "--steps", "2", "--output", str(tmp_path / "b")]) == 2
    assert "exists already" in capsys.readouterr().err and not list((tmp_path / "b").iterdir())
    assert main([str(tmp_path / "nothing"), "--at", "4", "--steps", "2"]) == 2
    assert "is no run" in capsys.readouterr().err
