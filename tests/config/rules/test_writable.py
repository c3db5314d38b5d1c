"""Folders that this user cannot write are found before a start. A start elsewhere does not ask for them."""

from __future__ import annotations

import os

import pytest

from megatron.config import ConfigError, load
from tests.config.broken import BASE

NOBODY = 65534


@pytest.fixture
def somebody(folder):
    """A user whom permissions bind: root is not."""
    before = os.geteuid()
    keys()  # what is imported late may lie where only root reads
    if before == 0:
        os.seteuid(NOBODY)
    yield
    os.seteuid(before)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (tmp_path / "base.yml").write_text(BASE)
    (tmp_path / "locked").mkdir()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for each in (tmp_path, *list(tmp_path.parents)[:3]):
        each.chmod(each.stat().st_mode | 0o055)
    (tmp_path / "locked").chmod(0o555)
    return tmp_path


def keys(*overrides: str, **options) -> list[str]:
    try:
        load(["base.yml"], overrides, ranks=2, **options)
    except ConfigError as error:
        return [each.key for each in error.problems if "must be a folder that the run can write into" in each.rule]
    return []


def test_each_folder_is_looked_at(folder, somebody):
    assert keys("run.dir=open/run") == []
    assert keys("run.dir=locked/run") == ["run.dir"]  # not again for the checkpoints inside it
    assert keys("run.dir=open/run", "checkpoint.dir=locked/kept") == ["checkpoint.dir"]
    assert keys("run.dir=run", f"launch.working_directory={folder}/locked") == ["run.dir"]


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_a_folder_that_root_may_write_and_nobody_can(folder):
    """Permissions would say yes to root in /proc, and on network disks that do not know root."""
    assert keys("run.dir=open/run", "checkpoint.dir=/proc/x") == ["checkpoint.dir"]
    assert keys("run.dir=/proc/x") == ["run.dir"]
    assert keys("run.dir=open/run") == [] and not os.listdir(folder / "open")


def test_other_machines_have_their_own(folder, somebody):
    (folder / "open" / "hosts").write_text("a slots=2\n")
    assert keys("run.dir=locked/run", "launch.hostfile=open/hosts") == []
    assert keys("run.dir=locked/run", here=False) == []
    assert keys("run.dir=locked/run", check_inputs=False) == []
