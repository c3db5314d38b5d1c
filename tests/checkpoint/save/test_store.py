"""Which checkpoint a run resumes from, which are kept, and when one is saved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import CheckpointError, Fragment, FragmentSpec, Meta, save
from megatron.checkpoint.save import store as store_module
from megatron.checkpoint.save.policy import StopSignals, reason_to_save
from megatron.checkpoint.save.store import Store, sole_writer
from megatron.config.sections.output import CheckpointSection
from megatron.parallel.layout.shard import LogicalTensor, Role
from tests.checkpoint.model import Together
from tests.paths import ROOT

VECTOR = LogicalTensor("vector", (6,), Role.NORM)


def write(directory: Path, step: int, **more) -> Path:
    values = torch.full((6,), float(step))
    return save(directory, step, [Fragment(VECTOR, "weight", 0, 1, 0, values)], Meta(step, **more))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_resume_words(tmp_path):
    runs = tmp_path / "run" / "checkpoints"
    store = Store(runs)
    assert store.resume("auto").checkpoint is None and "no checkpoint in" in store.resume("auto").reason
    for step in (5, 10, 1000):
        write(runs, step)
    assert store.resume("auto").checkpoint.step == 1000
    assert store.resume("none").checkpoint is None
    assert store.resume(str(runs / "step_00000005")).checkpoint.step == 5
    assert Store(tmp_path / "elsewhere").resume(str(runs)).checkpoint.step == 1000


def test_a_missing_checkpoint_is_an_error_that_says_what_is_there(tmp_path):
    write(tmp_path, 5)
    with pytest.raises(CheckpointError, match="does not exist.*step_00000005"):
        Store(tmp_path / "new").resume(str(tmp_path / "step_00000006"))
    with pytest.raises(CheckpointError, match="does not exist. There is no checkpoint in"):
        Store(tmp_path / "new").resume(str(tmp_path / "nothing" / "step_00000006"))


def test_an_empty_directory_with_a_checkpoint_name_is_not_one(tmp_path):
    write(tmp_path, 5)
    (tmp_path / "step_00000009").mkdir()
    found = Store(tmp_path).resume()
    assert found.checkpoint.step == 5
    assert "step_00000009" in found.reason and "manifest.json: it is missing" in found.reason


def test_weights_alone_are_not_resumed(tmp_path):
    write(tmp_path, 5)
    path = write(tmp_path, 6, resumable=False)
    found = Store(tmp_path).resume()
    assert found.checkpoint.step == 5 and found.skipped == [(path, "it has only weights")]
    with pytest.raises(CheckpointError, match="checkpoint.initialize_from"):
        Store(tmp_path).resume(str(path))


def test_all_ranks_choose_alike(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, step)
    os.truncate(tmp_path / "step_00000003/data/0000/rank_00000.safetensors", 10)
    found = Together(3).run(lambda member: Store(tmp_path, member).resume())
    assert [each.checkpoint.step for each in found] == [2, 2, 2]
    assert all("step_00000003" in each.reason for each in found)


def test_retention(tmp_path):
    for step in range(10, 80, 10):
        write(tmp_path, step)
    store = Store(tmp_path)
    assert store.retain(None) == []
    assert store.retain(3, 20) == ["step_00000010", "step_00000030"]
    assert store.retain(2, None, protect={"step_00000040"}) == ["step_00000020", "step_00000050"]
    assert names(tmp_path) == ["step_00000040", "step_00000060", "step_00000070"]
    with pytest.raises(ValueError, match="keep_last must be at least 1, not 0"):
        store.retain(0)


def test_the_newest_complete_one_is_never_deleted(tmp_path):
    """A newer directory that lacks a file does not count among the kept."""
    for step in (1, 2, 3):
        write(tmp_path, step)
    (tmp_path / "step_00000003/data/0000/rank_00000.safetensors").unlink()
    assert Store(tmp_path).retain(1) == ["step_00000001"]
    assert names(tmp_path) == ["step_00000002", "step_00000003"]
    assert Store(tmp_path).retain(1) == []


def test_clean(tmp_path):
    write(tmp_path, 1)
    write(tmp_path, 2)
    (tmp_path / "step_00000002").rename(tmp_path / "step_00000002.old-abc")
    (tmp_path / "step_00000003.tmp-0a1").mkdir()
    (tmp_path / "step_00000004.trash-0a1").mkdir()
    (tmp_path / "step_00000001.old-0b1").mkdir()
    (tmp_path / "notes.tmp-0a1").mkdir()
    done = Store(tmp_path).clean()
    assert len(done) == 4 and any("step_00000002 put back" in line for line in done)
    assert names(tmp_path) == ["notes.tmp-0a1", "step_00000001", "step_00000002"]
    assert Store(tmp_path).resume().checkpoint.step == 2
    assert Store(tmp_path / "not there yet").clean() == []


def test_saving_a_step_again_replaces_it(tmp_path):
    write(tmp_path, 1)
    save(tmp_path, 1, [Fragment(VECTOR, "weight", 0, 1, 0, torch.zeros(6))], Meta(1))
    assert names(tmp_path) == ["step_00000001"]
    checkpoint = Store(tmp_path).resume().checkpoint
    assert torch.equal(checkpoint.read(FragmentSpec.whole(VECTOR, "weight")).data, torch.zeros(6))


# -- when --------------------------------------------------------------------------------------------------------------


def saved(section: CheckpointSection, last: int) -> list[int]:
    return [step for step in range(last + 1) if reason_to_save(section, step, last_step=last)]


def test_pythia_schedule():
    """Steps 0, 1, 2, 4, ..., 512 and every thousandth to 143000: the 154 published checkpoints."""
    steps = saved(CheckpointSection(every=1000, log_spaced=True), 143000)
    assert steps == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, *range(1000, 143001, 1000)]
    assert len(steps) == 154


def test_policy_from_the_configuration():
    section = CheckpointSection(every=4, steps=[3, 9], minutes=2.0)
    assert saved(section, 10) == [3, 4, 8, 9, 10]
    assert saved(section.model_copy(update={"at_end": False}), 10) == [3, 4, 8, 9]
    assert reason_to_save(section, 1, seconds_since_save=119.9) is None
    assert reason_to_save(section, 1, seconds_since_save=120.0) == "every 2 minutes"
    assert reason_to_save(section, 1, stopping=True) == "the run was asked to stop"
    assert saved(CheckpointSection(), 10) == [10]


def test_signals_are_remembered_and_given_back():
    before = signal.getsignal(signal.SIGUSR1)
    with StopSignals([signal.SIGUSR1]) as asked:
        assert asked.received is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert asked.received == "SIGUSR1"
        assert signal.getsignal(signal.SIGUSR1) == before  # a second one is not swallowed
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_folder_has_one_writer(tmp_path):
    """Until its process ends, however it ends: the next start must not wait for anything."""
    script = (
        "import sys, time\nfrom megatron.checkpoint.save.store import sole_writer\n"
        f"with sole_writer({str(tmp_path / 'x')!r}):\n print('mine', flush=True)\n time.sleep(3600)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT) as other:
        assert other.stdout.readline() == "mine\n"
        both = Together(2)
        for answer in both.run(lambda member: enter(tmp_path / "x", member)):
            assert isinstance(answer, CheckpointError) and f"process {other.pid} on" in str(answer)
        assert both.run(lambda member: enter(tmp_path / "x", member, insist=False)) == ["in", "in"]
        other.kill()
    for _ in range(2):
        assert both.run(lambda member: enter(tmp_path / "x", member)) == ["in", "in"]


def enter(directory: Path, member, **options) -> str:
    with sole_writer(directory, member, **options):
        member.barrier()
        return "in"


def test_retention_looks_at_few_checkpoints(tmp_path, monkeypatch):
    """A checkpoint has a file per rank: each check of a kept one would cost thousands of them, at every save."""
    for step in range(10, 100, 10):
        write(tmp_path, step)
    looked = []
    real = store_module.open_checkpoint

    def look(path: Path, **options):
        looked.append(path.name)
        return real(path, **options)

    monkeypatch.setattr(store_module, "open_checkpoint", look)
    assert Store(tmp_path).retain(1, 20, protect={"step_00000010"}) == [
        "step_00000030",
        "step_00000050",
        "step_00000070",
    ]
    assert looked == ["step_00000090", "step_00000070", "step_00000050", "step_00000030"]
