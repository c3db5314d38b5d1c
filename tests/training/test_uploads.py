"""Runs that upload their checkpoints, and go on from what they have uploaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron.checkpoint import open_checkpoint
from megatron.config import load
from megatron.report.ledger import read_ledger
from megatron.training.uploads import copies_of, leave_later
from tests.training.test_run import TINY, losses, start


def test_a_run_goes_on_from_a_url(tmp_path: Path) -> None:
    expected = start(tmp_path, 1)
    url = f"file://{tmp_path}/bucket"
    start(tmp_path, 1, f"run.dir={tmp_path}/first", f"checkpoint.upload={url}", "training.stop_at_step=4")
    (tmp_path / "bucket" / "step_00000005").mkdir()  # an upload that never came to its manifest
    found = start(tmp_path, 2, f"run.dir={tmp_path}/second", f"checkpoint.resume={url}")
    assert losses(found) == pytest.approx(losses(expected)[-len(losses(found)) :], rel=1e-5) and found[0]["step"] == 4
    again = start(
        tmp_path, 1, f"run.dir={tmp_path}/third", f"checkpoint.initialize_from={url}/step_00000002", "training.steps=2"
    )
    assert again[0]["step"] == 0
    with pytest.raises(RuntimeError, match="there is no checkpoint"):
        start(tmp_path, 1, f"run.dir={tmp_path}/fourth", f"checkpoint.resume={url}/nowhere")


def test_a_run_that_has_lost_its_folder_goes_on_from_what_it_uploaded(tmp_path: Path) -> None:
    """Every 4th step, of which the newest two stay; a run that never began takes nothing from there."""
    bucket, expected = tmp_path / "bucket", start(tmp_path, 1, f"run.dir={tmp_path}/whole", "training.steps=14")
    own = (f"checkpoint.upload=file://{bucket}", "checkpoint.upload_every=4", "checkpoint.upload_keep_last=2")
    own = (*own, f"run.dir={tmp_path}/run", "training.steps=14")
    start(tmp_path, 1, *own, "training.stop_at_step=13")
    assert sorted(path.name for path in bucket.iterdir()) == ["step_00000008", "step_00000012"]
    shutil.rmtree(tmp_path / "run/checkpoints")
    found = start(tmp_path, 2, *own)
    assert [line["step"] for line in found if "loss" in line][-2:] == [12, 13]
    assert losses(found)[-2:] == pytest.approx(losses(expected)[-2:], rel=1e-5)
    (resumed,) = [each for each in read_ledger(tmp_path / "run/ledger.jsonl") if each["event"] == "resume"]
    assert resumed["step"] == 12 and "fetched" in resumed["checkpoint"]
    damaged = next((bucket / "step_00000012").glob("data/*/*"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    shutil.rmtree(tmp_path / "run/checkpoints")
    with pytest.raises(RuntimeError, match="step_00000012"):
        start(tmp_path, 1, *own)
    # The ledger of a run whose first start failed before rank 0 opened it.
    (tmp_path / "other").mkdir()
    (tmp_path / "other/ledger.jsonl").write_text('{"event": "restart", "time": "2026-01-01"}\n')
    other = (*own, f"run.dir={tmp_path}/other", "optimizer.lr=1e-3")
    assert start(tmp_path, 1, *other, "training.stop_at_step=1", attempt=1)[0]["step"] == 0
    start(tmp_path, 1, *other, "training.stop_at_step=12")  # takes the names 8 and 12 for its own checkpoints
    with pytest.raises(RuntimeError, match="step_00000008: it is not known to be the one that this run has uploaded"):
        start(tmp_path, 1, *own)
    shutil.rmtree(bucket)
    with pytest.raises(RuntimeError, match="step_00000012: it is gone"):
        start(tmp_path, 1, *own)


def test_what_a_run_went_back_from_is_not_taken_from_its_copies(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    own = (f"checkpoint.upload=file://{bucket}", f"run.dir={tmp_path}/run")
    start(tmp_path, 1, *own)
    folder = tmp_path / "run/checkpoints"
    start(tmp_path, 1, *own, f"checkpoint.resume={folder}/step_00000002", "training.stop_at_step=4")
    shutil.rmtree(folder)
    start(tmp_path, 1, *own, "training.stop_at_step=5")
    ledger = read_ledger(tmp_path / "run/ledger.jsonl")
    assert [each["step"] for each in ledger if each["event"] == "resume"] == [2, 4]
    assert [each["step"] for each in ledger if each["event"] == "uploaded"][:4] == [2, 4, 6, 4]
    assert open_checkpoint(bucket / "step_00000006").step == 6  # still there, for whoever names it


def test_the_account_of_copies(tmp_path: Path) -> None:
    """A rollback, a start anew, going back without having begun there, and an older ledger that has names alone."""
    (tmp_path / "tiny.yml").write_text(TINY)
    config = load([str(tmp_path / "tiny.yml")], [f"run.dir={tmp_path}"], ranks=1).config

    def own(*events: dict) -> dict[int, str]:
        path = tmp_path / "ledger.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in events))
        return {step: copy.manifest for step, copy in copies_of(path).own.items()}

    copies = [
        {"event": "uploaded", "step": step, "url": f"memory://b/step_{step:08d}", "manifest": f"m{step}"}
        for step in (400, 500, 800)
    ]
    back = {"event": "rollback", "step": 900, "to": 500}
    assert own(*copies) == {400: "m400", 500: "m500", 800: "m800"}
    assert own(*copies, back) == {400: "m400", 500: "m500"}
    assert own(*copies, {"event": "resume", "step": 400, "checkpoint": "c"}) == {400: "m400"}
    assert own(*copies, back, copies[2] | {"manifest": "new"}) == {400: "m400", 500: "m500", 800: "new"}
    assert own(*copies) and leave_later(config, 450) is None
    assert [each.get("steps") for each in read_ledger(tmp_path / "ledger.jsonl")][3:] == [[500, 800]]
    assert copies_of(tmp_path / "ledger.jsonl").own.keys() == {400} and leave_later(config, 450) is None
    assert len(read_ledger(tmp_path / "ledger.jsonl")) == 4
    assert own(*copies, {"event": "start", "step": 0}) == {} == own({"event": "forked", "step": 400})
    assert own({"event": "checkpoint_written", "uploaded": "memory://b/step_00000400"}) == {400: ""}
