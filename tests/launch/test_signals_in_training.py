"""A real run, real signals: each of them saves, ends the run with its status, and the next start continues."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.paths import ROOT


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts a run that does not end by itself. Processes of a failed test are killed."""
    started: list[subprocess.Popen] = []

    def begin(folder: Path, *before: str) -> subprocess.Popen:
        words = [sys.executable, str(ROOT / "deepy.py"), "--ranks", "2", str(ROOT / "train.py")]
        words += [str(ROOT / "configs/test/tiny_neox.yml"), f"run.dir={folder}", "training.steps=100000"]
        words += ["launch.device=cpu", "logging.curve=false"]
        job = subprocess.Popen([*before, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        started.append(job)
        return job

    yield begin
    for job in started:
        if job.poll() is None:
            job.kill()  # its agent notices, and ends the ranks
            job.communicate()


def trained(job: subprocess.Popen, folder: Path, lines: int = 3) -> None:
    """Wait until some steps were made."""
    metrics, end = folder / "metrics.jsonl", time.monotonic() + 400
    while not metrics.exists() or metrics.read_text().count("\n") < lines:
        assert job.poll() is None and time.monotonic() < end, job.communicate()
        time.sleep(0.05)


@pytest.mark.tour
@pytest.mark.parametrize("name", [pytest.param("SIGHUP", marks=pytest.mark.slow), "SIGUSR2"])
def test_a_signal_saves_and_then_ends(start, tmp_path, name):
    number = getattr(signal, name)
    job = start(tmp_path / "run")
    trained(job, tmp_path / "run")
    job.send_signal(number)
    out, error = job.communicate(timeout=400)
    assert job.returncode == 128 + number, error
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step_????????")
    assert int(saved.name[5:]) > 0 and "Traceback" not in out + error


@pytest.mark.slow
def test_nohup_outlives_the_terminal(start, tmp_path):
    job = start(tmp_path / "run", "nohup")
    trained(job, tmp_path / "run")
    job.send_signal(signal.SIGHUP)
    before = (tmp_path / "run" / "metrics.jsonl").read_text().count("\n")
    trained(job, tmp_path / "run", before + 20)
    job.send_signal(signal.SIGTERM)
    assert job.communicate(timeout=400) and job.returncode == 143
