"""Runs that upload their checkpoints, and continue from what they have uploaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from megatron.checkpoint import CheckpointError, Fragment, FragmentSpec, Meta, open_checkpoint
from megatron.checkpoint.format.communicator import SOLO
from megatron.checkpoint.save.saver import Saver
from megatron.checkpoint.save.store import Store
from megatron.config import load
from megatron.parallel.layout.shard import LogicalTensor, Role
from megatron.report.ledger import Ledger, read_ledger
from megatron.training.start.fetch import copies_of, leave_later, or_uploaded
from tests.training.test_run import TINY, losses, start, tensors


def stored(url: str, every: int | str = "auto", keep: int | str = "all") -> str:
    return f"checkpoint.levels=[{{place: store, url: '{url}', every: {every}, keep: {keep}}}]"


@pytest.mark.tour
def test_a_run_goes_on_from_a_url(tmp_path: Path) -> None:
    expected = start(tmp_path, 1)
    url = f"file://{tmp_path}/bucket"
    start(tmp_path, 1, f"run.dir={tmp_path}/first", stored(url), "training.stop_at_step=4")
    (tmp_path / "bucket" / "step_00000005").mkdir()  # an upload that never came to its manifest
    found = start(tmp_path, 2, f"run.dir={tmp_path}/second", f"checkpoint.resume={url}")
    assert losses(found) == pytest.approx(losses(expected)[-len(losses(found)) :], rel=1e-5) and found[0]["step"] == 4
    again = start(
        tmp_path, 1, f"run.dir={tmp_path}/third", f"checkpoint.initialize_from={url}/step_00000002", "training.steps=2"
    )
    assert again[0]["step"] == 0
    with pytest.raises(RuntimeError, match="there is no checkpoint"):
        start(tmp_path, 1, f"run.dir={tmp_path}/fourth", f"checkpoint.resume={url}/nowhere")


def resumed(tmp_path: Path) -> list[dict]:
    return [each for each in read_ledger(tmp_path / "run/ledger.jsonl") if each["event"] == "resume"]


def test_a_run_that_has_lost_its_folder_goes_on_from_its_store(tmp_path: Path) -> None:
    """Every 4th step is saved for it. The newest two stay there. A run that never began takes nothing."""
    bucket, expected = tmp_path / "bucket", start(tmp_path, 1, f"run.dir={tmp_path}/whole", "training.steps=14")
    own = (stored(f"file://{bucket}", every=4, keep=2), "checkpoint.every=5", f"run.dir={tmp_path}/run")
    own = (*own, "training.steps=14")
    start(tmp_path, 1, *own, "training.stop_at_step=13")
    assert sorted(path.name for path in bucket.iterdir()) == ["ledger.jsonl", "step_00000008", "step_00000012"]
    shutil.rmtree(tmp_path / "run/checkpoints")
    found = start(tmp_path, 1, *own)
    assert [line["step"] for line in found if "loss" in line][-2:] == [12, 13]
    assert losses(found)[-2:] == losses(expected)[-2:] and resumed(tmp_path)[-1]["step"] == 12
    ended, whole = tensors(tmp_path, 14), tensors(tmp_path, 14, "whole")
    assert ended.keys() == whole.keys() and all(torch.equal(ended[key], whole[key]) for key in whole)
    damaged = next((bucket / "step_00000012").glob("data/*/*"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    shutil.rmtree(tmp_path / "run/checkpoints")
    assert losses(start(tmp_path, 2, *own))[-1] == pytest.approx(losses(expected)[-1], rel=1e-5)
    assert "fetched" in resumed(tmp_path)[-1]["checkpoint"] and resumed(tmp_path)[-1]["step"] == 8
    # The ledger of a run whose first start failed before rank 0 opened it.
    (tmp_path / "other").mkdir()
    (tmp_path / "other/ledger.jsonl").write_text('{"event": "restart", "time": "2026-01-01"}\n')
    other = (*own, f"run.dir={tmp_path}/other", "optimizer.lr=1e-3")
    assert start(tmp_path, 1, *other, "training.stop_at_step=1", attempt=1)[0]["step"] == 0
    start(tmp_path, 1, *other, "training.stop_at_step=12")  # takes the names 8 and 12 for its own checkpoints
    shutil.rmtree(tmp_path / "run/checkpoints")
    with pytest.raises(RuntimeError, match="step_00000008: it is not known to be the one that this run has uploaded"):
        start(tmp_path, 1, *own)
    shutil.rmtree(bucket)
    with pytest.raises(RuntimeError, match="step_00000012: it is gone"):
        start(tmp_path, 1, *own)


@pytest.mark.tour
def test_a_run_takes_from_its_store_what_is_newer_than_all_that_is_left_nearer(tmp_path: Path) -> None:
    bucket, expected = tmp_path / "bucket", start(tmp_path, 1, f"run.dir={tmp_path}/whole")
    own = (stored(f"file://{bucket}"), f"run.dir={tmp_path}/run")
    start(tmp_path, 1, *own, "training.stop_at_step=4")
    damaged = next((tmp_path / "run/checkpoints/step_00000004").glob("data/*/*"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    found = start(tmp_path, 1, *own)
    assert resumed(tmp_path)[0]["step"] == 4 and "fetched" in resumed(tmp_path)[0]["checkpoint"]
    assert losses(found)[-2:] == losses(expected)[-2:]
    ended, whole = tensors(tmp_path, 6), tensors(tmp_path, 6, "whole")
    assert ended.keys() == whole.keys() and all(torch.equal(ended[key], whole[key]) for key in whole)


VECTOR = LogicalTensor("vector", (100,), Role.NORM)


class Stored:
    """A run's folder, its store and its ledger, without the run."""

    def __init__(self, tmp_path: Path, url: str):
        (tmp_path / "tiny.yml").write_text(TINY)
        given = [f"run.dir={tmp_path}/run", stored(url), f"checkpoint.dir={tmp_path}/run/checkpoints"]
        self.config = load([str(tmp_path / "tiny.yml")], given, ranks=1).config
        self.store = Store(self.config.checkpoint.dir)
        self.ledger = Path(self.config.run.dir) / "ledger.jsonl"
        self.ledger.parent.mkdir()
        copies = copies_of(self.ledger, Ledger(self.ledger))
        self.saver = Saver(self.config.checkpoint.dir, self.config.checkpoint, copies=copies)
        self.world = SimpleNamespace(communicator=SOLO, is_main=True)

    def save(self, step: int) -> None:
        data = torch.full((100,), float(step))
        self.saver.save(step, [Fragment(VECTOR, "master", 0, 1, 0, data)], Meta(step))
        assert self.saver.wait()[0].uploaded

    def restart(self) -> tuple[int, str]:
        """The step that a restart begins from, and why."""
        found, _ = or_uploaded(lambda: self.store.resume("auto"), self.store, self.config, self.world)
        step = found.checkpoint.step if found.checkpoint else -1
        if found.checkpoint is not None:
            values = found.checkpoint.read(FragmentSpec.whole(VECTOR, "master")).data
            assert torch.equal(values, torch.full((100,), float(step)))
        return step, found.reason


@pytest.mark.tour
def test_half_an_upload_is_never_taken_and_what_a_store_has_lost_is_passed_over(tmp_path: Path) -> None:
    bucket = f"bucket{tmp_path.name}"
    run, memory = Stored(tmp_path, f"memory://{bucket}"), fsspec.filesystem("memory")
    for step in (1, 2, 3, 4):
        run.save(step)
    shutil.rmtree(tmp_path / "run/checkpoints/step_00000004")
    memory.rm(f"/{bucket}/step_00000004/manifest.json")  # as of an upload that was cut
    memory.rm(f"/{bucket}/step_00000003/data/0000/rank_00000.safetensors")
    step, why = run.restart()
    assert step == 3 and "step_00000004: it is gone" in why  # of the folder: the store is asked only for newer ones
    shutil.rmtree(tmp_path / "run/checkpoints")
    step, why = run.restart()
    assert step == 2 and "step_00000004: it is gone" in why and "step_00000003: damaged" in why
    whole = next(iter(memory.find(f"/{bucket}/step_00000002/data")))
    memory.pipe_file(whole, memory.cat_file(whole)[:-1])
    shutil.rmtree(tmp_path / "run/checkpoints")
    assert run.restart()[0] == 1
    memory.rm(f"/{bucket}", recursive=True)
    shutil.rmtree(tmp_path / "run/checkpoints")
    with pytest.raises(CheckpointError, match="none can be used.*name a checkpoint in checkpoint.resume"):
        run.restart()


def test_a_store_that_does_not_answer_stops_only_a_run_that_has_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have the newest copy: who went further back would train again what is there."""
    run, asked = Stored(tmp_path, f"file://{tmp_path}/bucket"), []
    for step in (1, 2):
        run.save(step)

    def away(self: LocalFileSystem, path: str, **more: object) -> bool:
        asked.append(path)
        raise ConnectionError("no route to host")

    monkeypatch.setattr(LocalFileSystem, "exists", away)
    assert run.restart()[0] == 2 and not asked
    shutil.rmtree(tmp_path / "run/checkpoints/step_00000002")
    step, why = run.restart()
    assert step == 1 and "no route to host" in why and asked
    shutil.rmtree(tmp_path / "run/checkpoints")
    with pytest.raises(CheckpointError, match="no route to host"):
        run.restart()


def test_what_a_run_went_back_from_is_not_taken_from_its_copies(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    own = (stored(f"file://{bucket}"), f"run.dir={tmp_path}/run")
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
    """A rollback, a start again, and going back without having begun there."""
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
