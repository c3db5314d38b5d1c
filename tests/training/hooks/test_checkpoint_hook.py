"""The checkpoint hook with the checkpoint room's own saver: what it leaves on disk opens again."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import MASTER, Fragment, FragmentSpec, Meta, open_checkpoint
from megatron.checkpoint.format import durable
from megatron.checkpoint.format.errors import CheckpointError
from megatron.checkpoint.save.saver import Saver
from megatron.report.ledger import read_ledger
from megatron.training.hooks import checkpoint as checkpoint_hook
from megatron.training.hooks.checkpoint import CheckpointHook
from tests.training.settings import settings
from tests.training.toy import run, toy_trainer


@pytest.mark.parametrize("asynchronous", [False, True])
def test_saved_steps_are_whole_and_of_their_step(tmp_path, asynchronous):
    section = {"every": 3, "keep_last": 2, "asynchronous": asynchronous, "log_spaced": True}
    config = settings(
        7,
        run={"dir": str(tmp_path), "name": "run"},
        logging={"console": "quiet", "curve": False},
        optimizer={"lr": 0.05},
        checkpoint=section,
    )
    trainer = toy_trainer(config)
    saver = Saver(tmp_path / "checkpoints", config.checkpoint)
    tables: dict[int, torch.Tensor] = {}

    def contents(step: int):
        tables[step] = trainer.engine.table.detach().clone()
        fragments = [Fragment(p.logical, MASTER, 0, 1, 0, p.detach().flatten()) for p in trainer.engine.parameters]
        return fragments, Meta(step=step)

    place = next(index for index, hook in enumerate(trainer.hooks) if isinstance(hook, CheckpointHook))
    trainer.hooks[place] = CheckpointHook(config.checkpoint, saver, contents)
    assert run(trainer).finished
    assert list(tables) == [0, 1, 2, 3, 4, 6, 7]
    left = saver.store.paths()
    assert [int(path.name[-8:]) for path in left] == [6, 7]
    for path in left:
        checkpoint = open_checkpoint(path, verify="checksums")
        found = checkpoint.read(FragmentSpec.whole(trainer.engine.table.logical, MASTER))
        assert torch.equal(found.data, tables[checkpoint.step].flatten())
    ledger = read_ledger(tmp_path / "ledger.jsonl")
    reasons = [entry["reason"] for entry in ledger if entry["event"] == "checkpoint"]
    assert reasons[0] == "log-spaced" and reasons[3] == "every 3 steps" and reasons[-1] == "the last step"
    written = [entry for entry in ledger if entry["event"] == "checkpoint_written"]
    assert len(written) == 7 and written[-1]["path"] == str(left[-1])
    assert sum(len(entry["deleted"]) for entry in written) == 5


@pytest.mark.parametrize(
    ("asynchronous", "last", "number"),
    [
        (False, False, "ENOSPC"),
        (False, True, "ENOSPC"),
        (True, True, "ENOSPC"),
        (True, False, "EROFS"),
        (False, False, "ESTALE"),
    ],
)
def test_a_disk_that_is_full_or_refuses_does_not_end_the_run(tmp_path, monkeypatch, asynchronous, last, number):
    """Saves for which there is no room are reported and noted. The next one that is due tries again. Only a run that
    ends without its last checkpoint fails."""
    config = settings(
        8,
        run={"dir": str(tmp_path), "name": "run"},
        logging={"console": "quiet", "curve": False},
        checkpoint={"every": 2, "keep_last": 1, "asynchronous": asynchronous},
    )
    trainer = toy_trainer(config)
    saver = Saver(tmp_path / "checkpoints", config.checkpoint)
    full, code = (4, 6, 8) if last else (4, 6), getattr(errno, number)
    write, said = durable.write_fully, []
    writing = {"step": 0}

    def write_or_not(handle, data):
        if f"step_{writing['step']:08d}" in os.readlink(f"/proc/self/fd/{handle}") and writing["step"] in full:
            write(handle, data[:1])
            raise OSError(code, os.strerror(code))
        write(handle, data)

    def contents(step: int):
        saver._settle()  # so that what is written belongs to the step that is known here
        writing["step"] = step
        fragments = [Fragment(p.logical, MASTER, 0, 1, 0, p.detach().flatten()) for p in trainer.engine.parameters]
        return fragments, Meta(step=step)

    monkeypatch.setattr(durable, "write_fully", write_or_not)
    monkeypatch.setattr(trainer, "log", said.append)
    place = next(index for index, hook in enumerate(trainer.hooks) if isinstance(hook, CheckpointHook))
    trainer.hooks[place] = CheckpointHook(config.checkpoint, saver, contents)
    if last:
        with pytest.raises(CheckpointError, match="step_00000008.*\n.*unchanged"):
            run(trainer)
    else:
        assert run(trainer).finished
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step_{2 if last else 8:08d}"]
    open_checkpoint(saver.store.paths()[0], verify="checksums")
    failed = [each for each in read_ledger(tmp_path / "ledger.jsonl") if each["event"] == "checkpoint_failed"]
    assert [int(each["path"][-8:]) for each in failed] == list(full) and os.strerror(code) in failed[0]["problem"]
    assert any("continues" in line for line in said)


def test_a_save_that_was_refused_is_tried_again_before_the_next_is_due(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_hook, "AGAIN", 0.0)
    config = settings(
        12,
        run={"dir": str(tmp_path), "name": "run"},
        logging={"console": "quiet", "curve": False},
        checkpoint={"every": 5},
    )
    trainer = toy_trainer(config)
    saver, make = Saver(tmp_path / "checkpoints", config.checkpoint), Path.mkdir
    refusals = iter([OSError(errno.EROFS, os.strerror(errno.EROFS))])

    def mkdir(path, *arguments, **options):
        if ".tmp-" in path.name and (error := next(refusals, None)):
            raise error
        make(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    place = next(index for index, hook in enumerate(trainer.hooks) if isinstance(hook, CheckpointHook))

    def contents(step: int):
        fragments = [Fragment(p.logical, MASTER, 0, 1, 0, p.detach().flatten()) for p in trainer.engine.parameters]
        return fragments, Meta(step=step)

    trainer.hooks[place] = CheckpointHook(config.checkpoint, saver, contents)
    assert run(trainer).finished
    saves = [
        (each["step"], each["reason"])
        for each in read_ledger(tmp_path / "ledger.jsonl")
        if each["event"] == "checkpoint"
    ]
    again = "the last one could not be written"
    assert saves[0] == (5, "every 5 steps") and saves[1][1] == again and 5 < saves[1][0] < 10
    assert [each for each in saves[2:]] == [(10, "every 5 steps"), (12, "the last step")]
    assert [int(path.name[-8:]) for path in saver.store.paths()] == [saves[1][0], 10, 12]
