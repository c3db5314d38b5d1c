"""Training that loses a rank continues by itself, and ends where an undisturbed run ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.report.ledger import KINDS, goodput
from tests.paths import ROOT

pytestmark = pytest.mark.slow


def start(folder: Path, *options: str) -> subprocess.Popen:
    words = [sys.executable, str(ROOT / "deepy.py"), "--ranks", "2", *options, str(ROOT / "train.py")]
    words += [str(ROOT / "configs/test/tiny_neox.yml"), f"run.dir={folder}", "logging.curve=false"]
    words += ["training.steps=60", "checkpoint.every=5"]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def last_losses(folder: Path) -> dict[int, float]:
    """The loss of each step, the last entry where a step came twice."""
    return {line["step"]: line["loss"] for line in lines(folder / "metrics.jsonl") if "loss" in line}


def test_a_killed_rank_and_a_restart_change_nothing(tmp_path):
    quiet = start(tmp_path / "quiet")
    assert quiet.wait(200) == 0, quiet.communicate()
    job = start(tmp_path / "disturbed", "--restarts", "1")
    while not list((tmp_path / "disturbed").glob("checkpoints/step_*10")):
        assert job.poll() is None, job.communicate()
        time.sleep(0.02)
    log = (tmp_path / "disturbed" / "logs" / "rank_0001.log").read_text()
    os.kill(int(log.split("started as process ")[1].split(":")[0]), signal.SIGKILL)
    _, error = job.communicate(timeout=200)
    assert job.returncode == 0, error
    assert "first failure: rank 1" in error and "SIGKILL (137)" in error
    assert last_losses(tmp_path / "disturbed") == last_losses(tmp_path / "quiet"), "every loss, to the last digit"
    events = lines(tmp_path / "disturbed" / "ledger.jsonl")
    (restart,) = [each for each in events if each["event"] == "restart"]
    assert restart["attempt"] == 1 and restart["rank"] == 1 and restart["status"] == 137
    account = goodput(events)
    assert (account.starts, account.failures) == (2, 1) and all(account.seconds[part] > 0 for part in ("kept", "start"))
    last = [each["spent"] for each in events if "spent" in each][-1]
    end = last["since"] + sum(last[kind] for kind in KINDS)
    assert account.wall == pytest.approx(end - restart["since"], abs=0.1), (
        "every second from the first launch to the end"
    )
