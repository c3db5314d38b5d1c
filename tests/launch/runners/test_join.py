"""deepy.py started once per rank, by mpirun: it becomes the rank."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.launch.running import CONFIG
from tests.paths import ROOT


@pytest.mark.tour
def test_mpirun_of_deepy(tmp_path):
    if not shutil.which("mpirun.openmpi"):
        pytest.skip("needs mpirun.openmpi (tests/launch/debian-packages)")
    (tmp_path / "a.yml").write_text(CONFIG)
    (tmp_path / "notes").mkdir()
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    mpirun = ["mpirun.openmpi", *root, "--oversubscribe", "-np", "2", "-x", "NOTES", "-x", "PYTHONPATH"]
    script = [str(ROOT / "deepy.py"), str(ROOT / "tests" / "launch" / "gloo_worker.py"), "a.yml", "--", "steps", "2"]
    environment = {**os.environ, "NOTES": str(tmp_path / "notes"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*mpirun, sys.executable, *script], cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no runner (inside mpirun): this process is one of 2 ranks") == 1
    up = [json.loads((tmp_path / "notes" / f"up.{rank}").read_text()) for rank in range(2)]
    assert [(each["sum"], each["starter"], each["local"]) for each in up] == [
        (3.0, "openmpi", [rank, 2]) for rank in range(2)
    ]
    assert not (tmp_path / "runs").exists(), "nobody has started ranks of ranks"
