"""Runs that begin again from copies on their hosts: the end is that of a run that was never interrupted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.checkpoint.levels import Levels
from megatron.checkpoint.save.store import Store
from megatron.report.ledger import read_ledger
from megatron.training.hooks.checkpoint import Interval, failures, failures_answered
from megatron.training.hooks.levels import FIRST, LevelsHook
from tests.training.settings import settings
from tests.training.test_run import TINY, job, losses, tensors
from tests.workers import run as on_ranks

STEPS = ("evaluation.every=null", "evaluation.at_end=false", "checkpoint.every=null", "training.steps=8")


def interrupted(folder: str) -> list[list[dict]]:
    """On every rank: an undisturbed run, and one whose copies outlive it, as if it had been killed after a step. The
    second begins again with nothing but them, then once more with a newer checkpoint next to them."""
    whole = job(folder, 2, *STEPS, f"run.dir={folder}/whole")
    level = json.dumps([
        {"place": "memory", "path": f"{folder}/memory", "every": 3},
        {"place": "disk", "path": f"{folder}/disk", "every": 2},
    ])
    words = (*STEPS, f"checkpoint.levels={level}", f"run.dir={folder}/parts")
    remove = Levels.remove
    try:
        Levels.remove = lambda self: None  # type: ignore[method-assign]
        job(folder, 2, *words, "training.stop_at_step=7")
    finally:
        Levels.remove = remove  # type: ignore[method-assign]
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(f"{folder}/parts/checkpoints/step_00000007")
    torch.distributed.barrier()
    parts = job(folder, 2, *words, attempt=1)
    return [whole, parts]


def test_a_run_begins_again_from_its_hosts(tmp_path: Path) -> None:
    (tmp_path / "tiny.yml").write_text(TINY)
    whole, parts = on_ranks(2, interrupted, str(tmp_path))[0]
    assert losses(parts) == losses(whole), "every loss, to the last digit"
    ours, theirs = tensors(tmp_path, 8, "parts"), tensors(tmp_path, 8, "whole")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    events = read_ledger(tmp_path / "parts/ledger.jsonl")
    (resumed,) = [each for each in events if each["event"] == "resume"]
    assert resumed["step"] == 6 and resumed["checkpoint"] == "memory, step 6", "the nearer of two that have step 6"
    written = [(each["level"], each["step"]) for each in events if each["event"] == "level_written"]
    assert written == [("disk", 2), ("memory", 3)], "each once; the second start ended before one was due"
    assert [list((tmp_path / name).iterdir()) for name in ("memory", "disk")] == [[], []], "the run has ended"


def test_an_interval_counts_the_failures_that_nothing_nearer_answers(tmp_path: Path) -> None:
    entries = [{"event": "restart", "rank": 3}] * 5 + [{"event": "restart", "rank": None}, {"event": "end"}]
    config = settings(
        checkpoint={
            "levels": [
                {"place": "memory", "every": "auto"},
                {"place": "memory", "every": "auto", "neighbours": 1},
                {"place": "disk", "path": "/d", "every": "auto"},
            ]
        }
    )
    kinds = [failures_answered(config.checkpoint.levels, number) for number in range(3)]
    assert kinds == [{"rank"}, {"host"}, set()]
    assert [failures(entries, each) for each in kinds] == [5, 1, 0]
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(each) + "\n" for each in entries))
    named = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(tmp_path)})})
    intervals = [Interval(named, 16_384, each) for each in kinds]
    for each in intervals:
        each.saved(2.0)
    prior = 3600 * 50_700 / 16_384
    assert [each.between(0.0) for each in intervals] == pytest.approx([prior / 6, prior / 2, prior])
    assert intervals[0].least_waste(0.0) < intervals[1].least_waste(0.0) < intervals[2].least_waste(0.0)
    assert FIRST > 0


@pytest.mark.parametrize("there", ["saved", "not saved", "not to be read"])
def test_copies_go_when_the_end_is_in_the_folder_of_checkpoints(there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And only then: a server that does not answer ends no rank, for which the others would wait."""
    removed, told, store = [], [], Store("nowhere")

    def paths() -> list[Path]:
        if there == "not to be read":
            raise OSError(116, "Stale file handle")
        return [Path("step_00000020"), Path("step_00000030")][: 1 + (there == "saved")]

    monkeypatch.setattr(store, "paths", paths)
    levels = SimpleNamespace(hosts=SimpleNamespace(rank=0), remove=lambda: removed.append(True))
    exchange = SimpleNamespace(sum=lambda numbers: numbers)
    trainer = SimpleNamespace(error=None, back=None, completed=30, exchange=exchange, log=told.append)
    LevelsHook([], levels, store, lambda step: ([], None), lambda fragments: []).on_end(trainer)
    assert removed == [True] * (there == "saved")
    assert bool(told) == (there != "saved") and all("the copies stay" in line for line in told)
