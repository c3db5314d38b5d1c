"""A real full disk under run.dir: neither the agent nor the run dies of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.launch.running import Job


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"cannot mount a small disk here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_logs_degrade_with_one_message_and_come_back(tmp_path, small_disk):
    job = Job(tmp_path, "floods", ranks=2, overrides=(f"run.dir={small_disk}/run",))
    status, out, error = job.finish(100)
    assert status == 0, error
    assert error.count("cannot be written (No space left on device)") == 1 and "host was lost" not in error
    assert f"2997:{'x' * (2997 % 2500)}" in out  # what rank 0 says is still shown
    assert sum(each.stat().st_size for each in Path(small_disk).rglob("*.log")) > 100_000


def test_what_waited_is_written_when_there_is_room(tmp_path, small_disk):
    (small_disk / "filler").write_bytes(b"x" * (240 << 10))
    job = Job(tmp_path, "trainer", ranks=1, overrides=(f"run.dir={small_disk}/run",))
    job.note("up.0", 60)
    with open(small_disk / "more", "wb", buffering=0) as rest:
        try:
            while True:
                rest.write(b"x" * 512)
        except OSError:
            pass
    (small_disk / "filler").unlink()
    job.process.terminate()
    status, _, error = job.finish()
    assert status == 143, error
    assert "--- ended with status" in (small_disk / "run/logs/rank_0000.log").read_text()
    assert os.path.exists(job.notes / "saved.0")
