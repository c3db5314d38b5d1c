"""Packages that only some runs need: a plain installation trains without them and names the extra that is missing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megatron.extras import EXTRAS
from tests.paths import ROOT

BLOCK = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


@pytest.fixture
def plain(tmp_path):
    """Runs a command as if no optional package were installed. Gives status and both outputs."""
    (tmp_path / "sitecustomize.py").write_text(BLOCK.format(names=set(EXTRAS)))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def run(*words: str) -> tuple[int, str]:
        done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    return run


def test_a_plain_installation_trains_and_names_what_it_lacks(plain, tmp_path):
    folder = tmp_path / "run"
    words = ["configs/test/tiny_llama.yml", f"run.dir={folder}", "training.stop_at_step=2", "launch.device=cpu"]
    status, output = plain("deepy.py", "train.py", *words)
    assert status == 0 and "saved " in output and (folder / "loss.png").exists(), output
    for tool, extra in (("report.py", "report"), ("checkpoint/to_hf.py", "hf")):
        status, output = plain(f"tools/{tool}", str(folder), *([str(tmp_path / "out")] if extra == "hf" else []))
        assert status == 2 and f"deepy[{extra}]" in output and "Traceback" not in output, output


@pytest.mark.parametrize("key", ["logging.tensorboard=true", "logging.wandb.mode=offline"])
def test_a_sink_without_its_package_is_refused_before_the_start(plain, tmp_path, key):
    words = ["configs/test/tiny_llama.yml", f"run.dir={tmp_path}/run", "launch.device=cpu", key]
    status, output = plain("deepy.py", "--dry-run", "train.py", *words)
    assert status == 2 and "which is not installed" in output and "deepy[" in output, output
